"""A trained network at work: evaluate it, name images, find objects."""
