"""The configuration: sections, loading, checks, reference."""
