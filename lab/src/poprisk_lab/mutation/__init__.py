"""Does every test that docs/paper_to_code.md cites fail when the code that it is cited for is broken?"""
