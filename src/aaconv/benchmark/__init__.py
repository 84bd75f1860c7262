"""Time and memory of the layer, the attention operator and whole networks: `aaconv bench`."""
