"""What a training run leaves behind, one folder per run, and everything that is read from it again."""
