"""Backends: how the control plane's Protocols are met by real processes."""
