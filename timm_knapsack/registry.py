"""Registry: named entries that a call from outside can add to, and that listing, checking and building all read."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from .errors import KnapsackError

Entry = TypeVar("Entry")


class Registry(Mapping, Generic[Entry]):
    """Entries by their ``name``, in the order in which they were added.

    Args:
        what: what an entry is, for errors: "criterion".
        error: the class of errors to raise.

    Example:
        >>> from types import SimpleNamespace
        >>> fruits = Registry("fruit")
        >>> _ = fruits.add(SimpleNamespace(name="apple"))
        >>> list(fruits), fruits["apple"].name
        (['apple'], 'apple')
        >>> fruits.find("aple")
        Traceback (most recent call last):
        timm_knapsack.errors.KnapsackError: fruit 'aple' is not known; did you mean 'apple'? There are apple
    """

    def __init__(self, what: str, error: type[KnapsackError] = KnapsackError):
        self.what, self.error = what, error
        self._entries: dict[str, Entry] = {}

    def add(self, entry: Entry, replace: bool = False) -> Entry:
        """Add an entry; a name that is taken is refused unless ``replace`` says so."""
        name: Any = entry.name
        if not isinstance(name, str) or not name.isidentifier():
            raise self.error(f"{self.what} {name!r}: expected a name such as my_{self.what.replace(' ', '_')}")
        if name in self._entries and not replace:
            raise self.error(f"{self.what} {name!r} is there already; choose another name, or pass replace=True")
        self._entries[name] = entry
        return entry

    def remove(self, name: str) -> Entry:
        """Take an entry out and return it."""
        entry = self.find(name)
        del self._entries[name]
        return entry

    def find(self, name: Any) -> Entry:
        """The entry of that name, or an error that says which there are."""
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(str(name), self._entries, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? There are" if near else "choose one of"
        raise self.error(f"{self.what} {name!r} is not known; {hint} {', '.join(self._entries)}")

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
