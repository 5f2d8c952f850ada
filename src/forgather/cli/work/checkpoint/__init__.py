"""Work of `forgather checkpoint`: each module prints the result of one function of `forgather.tools.checkpoints`."""
