"""The control plane: pure asyncio; no torch, no ray, no user code."""
