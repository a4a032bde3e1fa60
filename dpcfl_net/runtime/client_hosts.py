"""Opens client runtimes: checks the privacy claim, enrols in the record book, and opens ledger and identity."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.protocol import check_runnable
from dpcfl_net.data import cache
from dpcfl_net.data.slices import Split
from dpcfl_net.experiment.job_files import Job, check_model, client_records, client_slice
from dpcfl_net.federation.canary_client import AuditedHost
from dpcfl_net.federation.canary_update import CanaryUpdateHost
from dpcfl_net.federation.capabilities import ClientSide
from dpcfl_net.federation.claim import claimed_events, composer, verify_claim
from dpcfl_net.federation.client_host import ClientHost, open_ledger
from dpcfl_net.federation.engine import Engine
from dpcfl_net.privacy.ledger.book_claims import Budget, PrivacyBudgetClaim
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.privacy.ledger.ledger_folder import is_missing
from dpcfl_net.privacy.ledger.record_book import RecordBook
from dpcfl_net.runtime.specs import USUAL_TERMS, WorkerTerms
from dpcfl_net.training.precision import hold_to_processor
from dpcfl_net.transport import identities
from dpcfl_net.transport.keys import client_key

INSIST = "DPCFL_DURABLE"  # environment variable: with 1, workers of this host flush their ledgers also if a run would not
_books: WeakValueDictionary[tuple[Path, bool], RecordBook] = WeakValueDictionary()


def make_host(
    job: Job,
    client: int,
    ledgers: Path,
    *,
    data_root: str | None = None,
    terms: WorkerTerms = USUAL_TERMS,
    durable: bool = True,
    engine: Callable[[], Engine] | None = None,
    key_folder: Path | None = None,
) -> ClientHost:
    """Open a client behind its privacy gate: verify the privacy claim, then open the ledger.

    Records are read after the first debit, except for the record book of ledger scope "dataset". An audited client holds
    canaries instead of its records and has a separate engine. With secure sums all other clients hold empty slots then.

    Args:
        job: The job.
        client: Client id.
        ledgers: Folder of the ledgers.
        data_root: Folder of the data sets; None: the usual one.
        terms: Terms on which the client serves.
        durable: False never flushes the ledger; True leaves it to the terms and the host.
        engine: Makes the engine that the clients of one process share; None: a separate engine.
        key_folder: Folder of the key pairs, needed for the client's identity in secure sums.

    Returns:
        The client runtime.

    Raises:
        ConfigError: As `check_runnable`, or if a job with secure sums is opened without the client's identity.
        Refused: If the job breaks its privacy claim, its model is for other data, the terms forbid it, or this processor lacks its
            precision.
        LedgerError: If the ledger is damaged, or belongs to another job.
    """
    check_runnable(job.protocol)
    algorithm = job.algorithm
    hold_to_processor(job.protocol)
    verify_claim(algorithm, client, cache.folder() / "claims", terms.policy)
    client_slice(job, client, data_root)  # missing data is an error before the first debit
    check_model(job, data_root)

    def open_data(part: Split) -> Any:
        return client_records(job, client, data_root, part)

    folder, flush = ledgers / client_key(client), durable and (terms.durable or os.environ.get(INSIST) == "1")
    book = open_book(terms, durable)
    _check_book(job, client, folder, terms, book)
    with ExitStack() as stack:
        ledger = open_ledger(folder, job.protocol, client, durable=flush)
        stack.callback(ledger.close)  # in a notebook, the ledger of a client that was not opened would stay locked
        if job.protocol.ledger_scope == "dataset":
            with _removed_if_refused(ledger):
                enrol(algorithm, client, open_data, terms, book, new_ledger=ledger.is_new)
        host = _host(job, algorithm, client, ledger, open_data, engine, _identity(job, client, key_folder))
        stack.pop_all()
    return host


def open_book(terms: WorkerTerms, durable: bool = True) -> RecordBook | None:
    """Return the record book of some terms; None without one.

    While a process keeps the object, its clients share it: what the book has read for one of them is not read again for the others.

    Args:
        terms: Terms on which clients serve.
        durable: Write the book with fsync.
    """
    if terms.book is None:
        return None
    return _books.setdefault((terms.book, durable), RecordBook(terms.book, durable=durable))


def _check_book(job: Job, client: int, ledger: Path, terms: WorkerTerms, book: RecordBook | None) -> None:
    """Raise Refused for a job that would enter no book, and for a client of the book that has lost its ledger."""
    if job.protocol.ledger_scope == "run" and (terms.book is not None or terms.budget is not None):
        raise Refused(
            "book",
            "this worker has a record book or a budget for all runs, and the job has ledger.scope 'run': it would not be entered",
        )
    if job.protocol.ledger_scope == "dataset" and book is not None and is_missing(ledger):
        # Before an empty ledger is made: one that a crash leaves would pass for the client's own at the next start.
        book.refuse_entered(digest(job.protocol), client)


def _host(
    job: Job, algorithm: ClientSide, client: int, ledger: Ledger, open_data: Callable[[Split], Any],
    engine: Callable[[], Engine] | None, identity: bytes | None,
) -> ClientHost:  # fmt: skip
    """Make the runtime of a client, or of one that holds canaries or is one in an audited run."""
    noise_seed, audit = job.experiment.noise, job.experiment.audit
    if audit is not None and job.protocol.privacy.unit == "client":
        update = audit.update(job.protocol, client)
        return CanaryUpdateHost(algorithm, client, ledger, open_data, update, noise_seed, identity)
    if audit is not None and (client in audit.clients or job.protocol.privacy.secure):
        canaries = audit.in_model(job.protocol.model.parameters)
        present = canaries.bits(client) if client in audit.clients else np.zeros(0, bool)
        return AuditedHost(algorithm, client, ledger, open_data, canaries, present, noise_seed, identity)
    shared = engine or (lambda: Engine.of(job.protocol))
    return ClientHost(algorithm, client, ledger, open_data, shared, noise_seed, identity)


def _identity(job: Job, client: int, key_folder: Path | None) -> bytes | None:
    """Read the secret key of a client's identity; None if the job has no secure sums."""
    if not job.protocol.privacy.secure:
        return None
    if key_folder is None:
        raise ConfigError("secure sums need the folder of the clients' identities (key_folder)")
    return identities.read_identity(key_folder, client, job.protocol.client(client).identity or "")


@contextmanager
def _removed_if_refused(ledger: Ledger) -> Iterator[None]:
    """Remove a new ledger, in which nothing is charged, if its client is refused in the `with` block.

    A ledger is made before its client is entered in the book: after a crash in between it is there, and the client is entered at
    the next start. So a client that is in the book without a ledger has lost it. After any other error, such as a full disk, the
    client may be in the book already, and the ledger stays.
    """
    try:
        yield
    except Refused:
        if ledger.is_new:  # removed while it is locked, so that no other process takes it for one that was there
            shutil.rmtree(ledger.folder)
        raise


def enrol(
    algorithm: ClientSide,
    client: int,
    open_data: Callable[[Split], Any],
    terms: WorkerTerms,
    book: RecordBook | None,
    *,
    new_ledger: bool = False,
) -> None:
    """Add the client's whole plan to the record book, for its training and validation records.

    Args:
        algorithm: The job's algorithm.
        client: Client id.
        open_data: Opens the records of a split.
        terms: Terms on which the client serves.
        book: The record book of the terms; None without one.
        new_ledger: True if the client had no ledger of this job.

    Raises:
        Refused: "book" if the worker has no record book, if the client is in the book and had no ledger, or if the job cannot be
            composed with others: a release without a guarantee, seeded noise, or a part of its delta that is reserved; otherwise as
            `RecordBook.enrol`.
    """
    if book is None:
        raise Refused(
            "book",
            "the job has ledger.scope 'dataset', which composes all runs on a record: give a record book (dpcfl worker --book)",
        )
    protocol = algorithm.protocol
    if protocol.unprotected:
        raise Refused("book", f"the job has no epsilon to compose: {protocol.unprotected[0]}")
    if protocol.accounted_delta < protocol.privacy.delta:
        raise Refused(
            "book", "a part of the job's delta is reserved (constant pace, secure sums), which a record book does not add up"
        )
    records = [open_data("train").record_digests()]
    if protocol.client(client).validation_records:
        records.append(open_data("validation").record_digests())
    claim = PrivacyBudgetClaim(
        digest(protocol), client, protocol.privacy.unit, protocol.privacy.adjacency, tuple(claimed_events(algorithm, client))
    )
    book.enrol(
        claim,
        np.concatenate(records),
        None if terms.budget is None else Budget(*terms.budget),
        composer(cache.folder() / "claims"),
        again=not new_ledger,
    )
