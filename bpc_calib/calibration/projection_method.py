"""The ways to find projections, by name. Importing this file is cheap, so the command line lists them in its help."""

from dataclasses import dataclass

__all__ = ["DEFAULT_METHOD", "PROJECTION_METHODS", "ProjectionMethod"]


@dataclass(frozen=True)
class ProjectionMethod:
    """One way to find projections; docs/projections.md says why these settings."""

    name: str
    summary: str
    nibbles: bool  # codes are nibbles instead of signs
    iterations: int  # steps per sign or nibble
    rounds: int  # least-squares updates of the projection
    metric: bool  # whether errors are measured in the query metric
    centred: bool  # subtract the mean key first
    shift: bool  # shift positions by default
    needs: bool  # measure what each KV head needs


DEFAULT_METHOD = "score-aware"
PROJECTION_METHODS = {
    method.name: method
    for method in (
        ProjectionMethod(
            DEFAULT_METHOD,
            "makes the error of the attention scores small",
            nibbles=False,
            iterations=8,
            rounds=6,
            metric=True,
            centred=True,
            shift=True,
            needs=True,
        ),
        ProjectionMethod(
            "nibbles",
            "does so with codes of nibbles instead of signs: nearer, but new tokens take longer to hash",
            nibbles=True,
            iterations=6,
            rounds=8,
            metric=True,
            centred=True,
            shift=True,
            needs=True,
        ),
        ProjectionMethod(
            "paper",
            "follows the paper's Algorithm 1 as printed",
            nibbles=False,
            iterations=1,
            rounds=0,
            metric=False,
            centred=False,
            shift=False,
            needs=False,
        ),
    )
}
