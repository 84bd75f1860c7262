"""What the training loop in aaconv.train is made of."""
