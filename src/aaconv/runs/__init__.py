"""What a training run leaves behind, one folder a run, and everything that is read from it again."""
