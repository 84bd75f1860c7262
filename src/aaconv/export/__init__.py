"""Networks leave the house: as ONNX or torch.export programs, as weights, to the Hugging Face hub; others' come in."""
