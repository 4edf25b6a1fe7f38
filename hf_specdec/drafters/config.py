"""TargetFields: what the config of every drafter with weights records of its target."""

from __future__ import annotations

from typing import Any


class TargetFields:
    """A base class of configs, before the config of transformers that they extend.

    Args:
        target_name_or_path: the target it was trained for, if known.
        target_revision: the commit or branch of that target.
        target_tokenizer_sha256: `tokenizer_fingerprint` of the target's tokenizer.
        kwargs: of the config of transformers.
    """

    def __init__(
        self,
        target_name_or_path: str | None = None,
        target_revision: str | None = None,
        target_tokenizer_sha256: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.target_name_or_path = target_name_or_path
        self.target_revision = target_revision
        self.target_tokenizer_sha256 = target_tokenizer_sha256

    def check_sizes(self, *names: str, least: int = 1, where: str = "") -> None:
        """Raises ValueError, naming field and value, unless each of these fields is an integer of at least `least`.

        Args:
            names: of the fields.
            least: for all of them.
            where: which config it is, for the message.
        """
        for name in names:
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}{where}; it must be an integer of at least {least}.")
