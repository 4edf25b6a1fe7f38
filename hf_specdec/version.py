"""The version of the package, and how it is installed."""

__version__ = "0.1.0"


def install_command(extra: str = "") -> str:
    """The command that installs the package, with an extra; no index has the package, so it runs in a checkout.

    Examples:
        >>> install_command("train")
        "pip install '.[train]' in a checkout of hf_specdec"
    """
    what = f"'.[{extra}]'" if extra else "."
    return f"pip install {what} in a checkout of hf_specdec"
