"""The handshake accepts a peer that knows the secret, and rejects every replay and change."""

import dataclasses
import hashlib
import struct

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._wire.handshake import (
    ARGUMENTS,
    CALLS,
    HELLO,
    NONCE,
    PROOF,
    RESULTS,
    VERSION,
    Addresses,
    Credentials,
    Hello,
    Party,
    dump_introduction,
    encode_hello,
    is_callee_proven,
    load_introduction,
    new_nonce,
    number_for,
    read_number,
)

LINK = 7

names = st.text(max_size=20)
numbers = st.integers(0, (1 << 63) - 1)
links = st.integers(0, (1 << 64) - 1)
nonces = st.binary(min_size=NONCE, max_size=NONCE)
parties = st.builds(Party, names, numbers)
credentials = st.builds(
    Credentials,
    parties,
    parties,
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=32, max_size=32),
)
addresses = st.builds(
    Addresses, names, names, st.none() | st.tuples(names, st.integers(1, (1 << 16) - 1))
)

SHARED = Credentials(Party("caller", 1), Party("callee", 2))
THEIRS, MINE = new_nonce(), new_nonce()
GREETING = encode_hello(SHARED, LINK, THEIRS, MINE)
ANSWER = Hello.load(GREETING).callee_proof(SHARED, THEIRS)


def changed(data: bytes, index: int, by: int) -> bytes:
    """The data with one byte changed."""
    return data[:index] + bytes([data[index] ^ by]) + data[index + 1 :]


def is_let_in(data: bytes, known: Credentials, nonce: bytes) -> bool:
    """Whether a callee of these credentials, who sent `nonce`, takes those bytes for a hello."""
    try:
        found = Hello.load(data)
    except ValueError:
        return False
    return found.key == known.key and found.is_proven(known, nonce)


# ── who knows the secret ────────────────────────────────────────────────────────────────────────


@pytest.mark.promise("security.proof")
@given(credentials, links, nonces, nonces)
def test_both_sides_prove_themselves(
    shared: Credentials, link: int, theirs: bytes, mine: bytes
) -> None:
    """With the same credentials each side accepts the proof of the other."""
    data = encode_hello(shared, link, theirs, mine)
    assert len(data) == HELLO
    found = Hello.load(data)
    assert (found.key, found.nonce, found.connection) == (shared.key, mine, link)
    assert found.is_proven(shared, theirs)
    proof = found.callee_proof(shared, theirs)
    assert len(proof) == PROOF
    assert is_callee_proven(shared, link, theirs, mine, proof)


def test_a_hello_is_small() -> None:
    """A stranger gets memory for one hello and no more."""
    assert HELLO <= 128


@given(st.integers(0, (1 << 62) - 1), st.sampled_from([CALLS, ARGUMENTS, RESULTS]))
def test_a_number_names_a_connection_and_a_purpose(connection: int, purpose: int) -> None:
    assert read_number(number_for(connection, purpose)) == (connection, purpose)


def test_secrets_differ() -> None:
    """Each introduction and each connection has numbers of its own."""
    one, other = (Credentials(Party("a", 1), Party("b", 2)) for _ in range(2))
    assert one.key != other.key
    assert one.secret != other.secret
    assert new_nonce() != new_nonce()
    assert len(new_nonce()) == NONCE


# ── who does not ────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, HELLO - 1), st.integers(1, 255))
def test_a_changed_hello_is_refused(index: int, by: int) -> None:
    """Any byte of it that is changed on its way is noticed."""
    assert is_let_in(GREETING, SHARED, THEIRS)
    assert not is_let_in(changed(GREETING, index, by), SHARED, THEIRS)


@pytest.mark.promise("security.proof")
@given(st.integers(0, PROOF - 1), st.integers(1, 255))
def test_a_changed_proof_is_refused(index: int, by: int) -> None:
    """Any byte of it that is changed on its way is noticed."""
    assert is_callee_proven(SHARED, LINK, THEIRS, MINE, ANSWER)
    assert not is_callee_proven(SHARED, LINK, THEIRS, MINE, changed(ANSWER, index, by))


@given(st.binary(max_size=PROOF - 1) | st.binary(min_size=PROOF + 1, max_size=64))
def test_a_proof_of_another_length_is_refused(proof: bytes) -> None:
    """A part of a proof, or more than one, is none."""
    assert not is_callee_proven(SHARED, LINK, THEIRS, MINE, proof)
    assert not is_callee_proven(SHARED, LINK, THEIRS, MINE, ANSWER[: len(proof)] + proof[PROOF:])


def other_credentials() -> list[Credentials]:
    """Credentials that differ from the shared ones in one thing, but for the key."""
    caller, callee = SHARED.caller, SHARED.callee
    return [
        dataclasses.replace(SHARED, secret=changed(SHARED.secret, 0, 1)),
        dataclasses.replace(SHARED, caller=Party("other", caller.worker_id)),
        dataclasses.replace(SHARED, caller=Party(caller.name, 3)),
        dataclasses.replace(SHARED, callee=Party("other", callee.worker_id)),
        dataclasses.replace(SHARED, callee=Party(callee.name, 3)),
        dataclasses.replace(SHARED, caller=callee, callee=caller),
    ]


@pytest.mark.parametrize("other", other_credentials())
def test_other_credentials_are_refused(other: Credentials) -> None:
    """The secret and both processes are a part of each proof, in their roles."""
    assert not is_let_in(encode_hello(other, LINK, THEIRS, MINE), SHARED, THEIRS)
    assert not is_let_in(GREETING, other, THEIRS)
    assert not is_callee_proven(other, LINK, THEIRS, MINE, ANSWER)
    answer = Hello.load(GREETING).callee_proof(other, THEIRS)
    assert not is_callee_proven(SHARED, LINK, THEIRS, MINE, answer)


@given(parties, parties, parties, parties)
def test_names_do_not_run_into_each_other(
    one: Party, two: Party, three: Party, four: Party
) -> None:
    """A proof of one pair of processes is a proof of no other pair."""
    first = dataclasses.replace(SHARED, caller=one, callee=two)
    second = dataclasses.replace(SHARED, caller=three, callee=four)
    data = encode_hello(first, LINK, THEIRS, MINE)
    assert is_let_in(data, second, THEIRS) is ((one, two) == (three, four))


def test_a_proof_of_the_callee_is_none_of_the_caller() -> None:
    """What a callee answered cannot be reflected at it, nor at the caller."""
    reflected = GREETING[:-PROOF] + ANSWER
    assert Hello.load(reflected).proof == ANSWER
    assert not is_let_in(reflected, SHARED, THEIRS)
    assert not is_callee_proven(SHARED, LINK, THEIRS, MINE, GREETING[-PROOF:])


@given(nonces, nonces)
def test_the_order_of_the_nonces_counts(theirs: bytes, mine: bytes) -> None:
    """A proof for two nonces is none for the same two the other way round."""
    data = encode_hello(SHARED, LINK, theirs, mine)
    swapped = Hello.load(encode_hello(SHARED, LINK, mine, theirs))
    assert Hello.load(data).is_proven(SHARED, theirs)
    if theirs != mine:
        assert swapped.proof != Hello.load(data).proof
        assert not dataclasses.replace(swapped, nonce=mine).is_proven(SHARED, theirs)


@pytest.mark.promise("security.replay")
@given(nonces)
def test_a_recorded_hello_is_worth_nothing(nonce: bytes) -> None:
    """On another connection the callee has another nonce."""
    assert is_let_in(GREETING, SHARED, nonce) is (nonce == THEIRS)


@pytest.mark.promise("security.replay")
@given(nonces, nonces)
def test_a_recorded_answer_is_worth_nothing(theirs: bytes, mine: bytes) -> None:
    """On another connection the caller has another nonce, whatever that of the callee is."""
    same = (theirs, mine) == (THEIRS, MINE)
    assert is_callee_proven(SHARED, LINK, theirs, mine, ANSWER) is same
    assert not is_callee_proven(SHARED, LINK, THEIRS, changed(MINE, 0, 1), ANSWER)
    assert not is_callee_proven(SHARED, LINK, changed(THEIRS, 0, 1), MINE, ANSWER)


@pytest.mark.promise("security.replay")
@given(links)
def test_a_proof_is_for_one_connection(link: int) -> None:
    """A hello that is passed on is invalid for another connection."""
    other = dataclasses.replace(Hello.load(GREETING), connection=link)
    assert other.is_proven(SHARED, THEIRS) is (link == LINK)
    assert is_callee_proven(SHARED, link, THEIRS, MINE, ANSWER) is (link == LINK)


@given(st.binary(min_size=len(VERSION), max_size=len(VERSION)))
def test_a_hello_of_another_version(version: bytes) -> None:
    """It says so, whatever follows."""
    data = version + GREETING[len(VERSION) :]
    if data == GREETING:
        return
    with pytest.raises(ValueError, match="hello must start with"):
        Hello.load(data)


@given(st.binary(max_size=HELLO - 1))
def test_data_that_is_too_short_is_rejected(data: bytes) -> None:
    """Only HELLO bytes are read."""
    with pytest.raises(struct.error):
        Hello.load(data)


# ── introductions ───────────────────────────────────────────────────────────────────────────────


@given(credentials, addresses)
def test_introductions_arrive_as_they_were(shared: Credentials, where: Addresses) -> None:
    """Credentials and addresses come out of the bytes that torch RPC carries."""
    assert load_introduction(dump_introduction(shared, where)) == (shared, where)


def test_the_bytes_of_this_version() -> None:
    """Two workers of one VERSION read each other: it changes with these bytes."""
    shared = Credentials(Party("caller", 1), Party("callee", 2), bytes(16), bytes(32))
    where, nonce = Addresses("namespace", "socket", ("host", 1)), bytes(NONCE)
    data = dump_introduction(shared, where) + encode_hello(shared, LINK, nonce, nonce)
    assert (VERSION, hashlib.sha256(data).hexdigest()[:16]) == (b"aiorpc/2", "29869e114c1e8dd8")


@pytest.mark.promise("security.secrets")
def test_secrets_are_not_shown() -> None:
    """Nothing that is logged has the secret in it."""
    assert SHARED.secret.hex() not in repr(SHARED)
    assert repr(SHARED.secret) not in repr(SHARED)
    assert "secret" not in repr(SHARED)
