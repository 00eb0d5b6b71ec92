"""What is loaded inside servers that are not ours: a small model in numpy, and how each of them is told to run it."""
