"""Every error kvtier raises, in one tree.

An error says what is wrong and what to do about it. Nothing in this tree is ever raised into an
engine's scheduler: a tier answers with a named outcome (`kvtier.types.Outcome`) instead.
"""


class KVTierError(Exception):
    """Base of all errors that kvtier raises on purpose."""


class ConfigError(KVTierError):
    """The configuration is wrong: `place` names where, the message what and what would be right."""

    def __init__(self, place: str, problem: str, remedy: str = "") -> None:
        self.place = place
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{place}: {problem}" + (f" - {remedy}" if remedy else ""))


class NamespaceMismatch(KVTierError):
    """Data on a medium belongs to another model, layout or version."""


class FormatError(KVTierError):
    """Bytes on a medium are not what kvtier writes, or were written by a newer version."""


class MediumError(KVTierError):
    """A medium cannot be opened or used: a missing folder, no rights, no room."""


class NotResident(KVTierError):
    """A caller asked to load a key that this tier does not hold: look up first."""


class MoverError(KVTierError):
    """The mover cannot be started or reached."""


class ExtraMissing(KVTierError):
    """An optional dependency is needed: the message names the extra to install."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional package: pip install 'kvtier[{extra}]'")
