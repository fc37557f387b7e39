"""A run folder as one HTML file, and the models of the files in it."""
