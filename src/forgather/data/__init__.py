"""Text data: documents from files, tokens from documents, sequences of fixed length from tokens."""
