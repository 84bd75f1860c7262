"""What a kind of training brings: a network, data, a loss and an evaluation."""
