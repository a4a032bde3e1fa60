"""Settings that cannot be combined with secure sums."""

from __future__ import annotations

from dpcfl_net.algorithms.secure_clusters import FREE_PACE
from dpcfl_net.experiment.config_schema import Config


def secure_sum_problems(config: Config) -> list[str]:
    """List the problems of `privacy.trust: secure-aggregation` with other settings.

    Args:
        config: A configuration whose fields are valid one by one.

    Returns:
        One sentence for each problem: field, value and allowed values.
    """
    privacy, runtime, up = config.privacy, config.runtime, config.communication.up
    if not privacy.secure:
        given = privacy.secure_aggregation is not None
        return (
            [f"privacy.secure_aggregation belongs to privacy.trust secure-aggregation, got {privacy.trust!r}"] if given else []
        )
    asked, problems = "privacy.trust is 'secure-aggregation':", []
    if privacy.adjacency != "zero-out":
        problems.append(f"{asked} privacy.adjacency must be 'zero-out', got {privacy.adjacency!r}")
    if runtime.aggregators:
        problems.append(f"{asked} runtime.aggregators must be 0, got {runtime.aggregators}: the server adds masked vectors")
    if up.form != "float32":
        problems.append(f"{asked} communication.up must be float32, got {up.form!r}: clients send masked integers of 32 bits")
    if config.local.pace != "free":
        problems.append(FREE_PACE.format(config.local.pace))
    if config.ledger.scope != "run":
        problems.append(
            f"{asked} ledger.scope must be 'run', got {config.ledger.scope!r}: the distance of the noise from a Gaussian is reserved in "
            "one run's delta"
        )
    if config.audit.canaries and config.audit.client == "all" and privacy.unit == "sample":
        problems.append(
            f"{asked} audit.client must be the number of one client, got 'all': canaries of several clients would be in one sum"
        )
    if privacy.secure_aggregation is not None:
        from dpcfl_net.federation.secure import terms  # loads cryptography, which other jobs do not need here

        sizes = {config.data.client_count, *(config.data.clients if config.capabilities.uses_oracle else ())}
        problems += [text for size in sorted(sizes) for text in terms.problems(size, terms.settings_of(privacy))]
    return problems
