"""The language model both sides run: families, LoRA, weights, sampling engine, chat formats, adapter store."""
