"""Real text to training batches: corpora, tokenizers, token files, preparation, data order."""
