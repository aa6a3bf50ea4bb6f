"""Turns text into training batches: corpora, tokenizers, token files, preparation, data order."""
