"""The exceptions of Ouzel: each has the library's sentence, and a relative among Python's own."""


class Error(Exception):
    """What every error of Ouzel is."""


class InvalidArgumentError(Error, ValueError):
    """A shape, option or value that an operator or model cannot take."""


class BadFileError(Error, ValueError):
    """A file whose content is damaged or of another kind."""


class FileAccessError(Error, OSError):
    """The operating system refused to open, read or write."""


class OutOfMemoryError(Error, MemoryError):
    """There is not enough memory."""


class CancelledError(Error):
    """The call was interrupted before, and what it worked on cannot go on."""
