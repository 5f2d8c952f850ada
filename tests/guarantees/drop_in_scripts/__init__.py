"""Scripts and subclasses written for transformers' Trainer run on forgather.hf after a change of one import."""
