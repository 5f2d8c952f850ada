"""Tests of the drop-in `forgather.hf`."""
