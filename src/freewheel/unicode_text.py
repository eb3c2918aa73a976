"""Text that every reader takes: user code hands over Python strings, which need not be Unicode.

A lone surrogate (half of an emoji in a model's JSON, a byte of a file name that is not UTF-8)
cannot be encoded as UTF-8, and strict readers of JSON refuse its escape.
"""


def well_formed(text: str) -> str:
    """The text with each lone surrogate as U+FFFD; halves that stand side by side become one."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
