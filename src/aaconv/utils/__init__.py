"""What knows nothing of this package: files, figures, terminal, device, distributed training."""
