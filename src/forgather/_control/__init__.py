"""Control socket of a running job: address, messages and server. Only the standard library is imported.

`forgather.tools.control` is the client. `forgather.ml.trainer.control` connects the server to a trainer.
"""
