"""What every room stands on: linear algebra, derivatives, files, estimates, progress. Private; knows no room above."""
