"""publish: a pruned model on the Hugging Face Hub."""

from typing import Annotated

import typer

from . import console
from .options import JsonOption


def publish(
    folder: Annotated[str, typer.Argument(help="A folder with a saved pruned model.")],
    repo_id: Annotated[str, typer.Argument(help="Repository on the Hugging Face Hub, as me/resnet50-half.")],
    private: Annotated[bool, typer.Option(help="Make the repository private.")] = False,
    tag: Annotated[str | None, typer.Option(help="Tag of this version, as v1.")] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing; show what would be sent.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Publish a pruned model on the Hugging Face Hub: weights, config, model card, picture, in one commit.

    The token is the one that `hf auth login` stored, or HF_TOKEN.

    Example: timm-knapsack publish resnet18-half me/resnet18-half --dry-run
    """
    from ..hub.saving import push_to_hub
    from ..models.model_source import saved_folder

    sent = push_to_hub(saved_folder(folder), repo_id, private=private, tag=tag, commit_message=message, dry_run=dry_run)
    if as_json:
        console.print_json(
            {"repo_id": sent.repo_id, "files": sent.files, "url": sent.url, "private": sent.private, "tag": sent.tag}
        )
        return
    console.stdout().print(str(sent), markup=False)
