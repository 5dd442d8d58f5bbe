"""YAML that a stranger may have written: plain data, each key once, nothing that grows when it is read."""

from collections.abc import Hashable
from typing import Any

import yaml

from ..errors import KnapsackError, first_line
from .plain_json import shortened


class _Loader(yaml.SafeLoader):
    """Plain data only, without aliases: nine lines of them can stand for 10⁹ values."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(
                None, None, f"the alias *{event.anchor[:40]} is not allowed; write the value out", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        seen: set[Hashable] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # what is not is an error of the loader's own
                if key in seen:
                    problem = f"the key {shortened(key)} stands twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, source: str, error: type[KnapsackError] = KnapsackError) -> Any:
    """The data of a YAML text; what is not YAML, an alias, or a key that stands twice is an error that names the line.

    Example:
        >>> parse_yaml("{epochs: 2, lr: 0.01}", "a.yaml")
        {'epochs': 2, 'lr': 0.01}
        >>> parse_yaml("lr: 1\\nlr: 2", "a.yaml")
        Traceback (most recent call last):
        ...
        timm_knapsack.errors.KnapsackError: a.yaml, line 2: the key 'lr' stands twice
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as reason:
        kind = "" if isinstance(reason, yaml.constructor.ConstructorError) else "not YAML: "
        where = f", line {reason.problem_mark.line + 1}" if reason.problem_mark else ""
        raise error(f"{source}{where}: {kind}{reason.problem}") from None
    except yaml.YAMLError as reason:  # a character that no YAML holds
        raise error(f"{source}: not YAML: {first_line(reason)}") from None
    except RecursionError:
        raise error(f"{source}: nested too deeply") from None
    except (ValueError, TypeError, AttributeError, OverflowError) as reason:  # a date or number that does not exist
        raise error(f"{source}: a value can't be read: {reason}") from None
