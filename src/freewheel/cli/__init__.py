"""The command line. It imports no torch, ray or transformers: commands start in a moment."""
