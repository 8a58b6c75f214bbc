"""How training examples made the model what it is: derivatives through the recorded run."""
