"""A verb with sub-verbs that can also be used without one."""

from typing import TYPE_CHECKING

from typer.core import TyperGroup

if TYPE_CHECKING:  # typer has its own copy of click and does not export its types
    from typer._click import Context

DEFAULT = "default"
"""The name under which a group registers what it does without a sub-verb."""


class DefaultVerb(TyperGroup):
    """A group that hands everything to its command DEFAULT unless the first word is one of its other commands.

        schedule list          the sub-verb `list`
        schedule 1f1b ...      DEFAULT, with the argument "1f1b"
        schedule --help        the help of DEFAULT, which should name the sub-verbs

    It works below another group, which invokes the context's own command.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: "Context | None" = None, **extra: object
    ) -> "Context":
        """The click context of the sub-verb that the first of `args` names, or else of the default command."""
        if args and args[0] in self.commands and args[0] != DEFAULT:
            return super().make_context(info_name, args, parent, **extra)
        return self.commands[DEFAULT].make_context(info_name, args, parent, **extra)
