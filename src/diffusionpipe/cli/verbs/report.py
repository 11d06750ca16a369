"""`diffusionpipe report RUN|PLAN ...`: runs and plans as one page, a file that opens without a network."""

from pathlib import Path
from typing import Annotated

import typer

SourcesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN|PLAN ...",
        help="Folders of runs and plan files. Several are shown together, their differences first.",
        show_default=False,
    ),
]


def report(
    sources: SourcesArgument,
    out: Annotated[Path, typer.Option(help="The page, an HTML file.")] = Path("report.html"),
    share: Annotated[bool, typer.Option("--share", help="Leave out paths, host and user names.")] = False,
) -> None:
    """Show runs and plans in one page: does it learn, is it slow and why, samples, timeline, memory, recipe."""
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.files.output_file import write_atomically
    from diffusionpipe.workflows.report.page import report_page

    if out.suffix.lower() not in {".html", ".htm"}:
        raise ConfigError(f"--out {out}: a report is one HTML file; let its name end in .html")
    check_outputs(out)
    page = report_page(sources, is_shared=share)
    write_atomically(out, page)
    typer.echo(f"wrote {out}, {len(page.encode()) / 1e6:.2f} MB", err=True)
