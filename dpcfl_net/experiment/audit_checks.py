"""Settings that cannot be combined with an audit."""

from __future__ import annotations

from dpcfl_net.experiment.config_schema import Config


def audit_problems(config: Config) -> list[str]:
    """List the problems of an audit that are known before the plan.

    Args:
        config: A configuration whose fields are valid one by one.

    Returns:
        One sentence for each problem: field, value and allowed values.
    """
    audit, privacy, clients = config.audit, config.privacy, config.data.client_count
    if not audit.canaries:
        return []
    problems, asked = [], f"audit.canaries is {audit.canaries}:"
    if config.ledger.scope == "dataset":
        problems.append(f"{asked} canaries are not records: ledger.scope must be 'run', got 'dataset'")
    if privacy.unit == "client":
        return problems + _client_audit_problems(config, asked)
    if config.capabilities.plain_sgd:
        problems.append(f"{asked} canaries are records under DP-SGD, which {config.algorithm['name']} does not run")
    problems += _audit_transcript_problems(config, asked)
    if audit.client != "all" and not 0 <= audit.client < clients:
        problems.append(f"audit.client is {audit.client}: must be 0 to {clients - 1}, or all")
    return problems


def _audit_transcript_problems(config: Config, asked: str) -> list[str]:
    """Problem of an audit that reads a transcript, in a run without one."""
    if config.runtime.federation == "in-process":
        return [f"{asked} the audit reads a transcript: runtime.federation must be 'network'"]
    if config.output.transcript != "full":
        return [f"{asked} the audit reads a transcript: output.transcript must be 'full', got {config.output.transcript!r}"]
    return []


def _client_audit_problems(config: Config, asked: str) -> list[str]:
    """Problems of an audit of whole clients."""
    audit, able, clients, name = config.audit, config.capabilities, config.data.client_count, config.algorithm["name"]
    problems = []
    if config.privacy.trust == "untrusted-server":
        problems.append(
            f"{asked} whole clients are audited by sums over them: privacy.trust must be 'trusted-server' or 'secure-aggregation', got "
            f"{config.privacy.trust!r}"
        )
    if config.privacy.secure:
        problems += _audit_transcript_problems(config, asked)
    if getattr(config.options, "sampling", None) == "visible":
        problems.append(
            f"{asked} algorithm.sampling must not be 'visible': the audit knows one update of each client in every sum"
        )
    others = {
        "is asynchronous": able.asynchronous,
        "keeps a state in its clients": able.holds_state,
        "trains more than one model in a task": able.shared_models > 0,
    }
    if why := " and ".join(text for text, holds in others.items() if holds):
        problems.append(
            f"{asked} {name} with these options {why}, and the audit knows one update of each client in the sum of one secret sample"
        )
    if audit.client != "all":
        problems.append(
            f"audit.client is {audit.client}: must be all with privacy.unit client, where each client is one canary"
        )
    if audit.canaries > clients:
        problems.append(f"{asked} must be at most the {clients} clients, each of which is one canary")
    return problems
