"""Lets these tests import what lies beside them; trains each kind of tiny draft once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def learn(tmp_path_factory):
    """``learn("dspark")``, ``learn("eagle3")``: what their rig's ``trained`` gives. Copy a folder
    before you write into it: others read it too.
    """
    import dspark_rig
    import eagle3_rig

    rigs, found = {"dspark": dspark_rig, "eagle3": eagle3_rig}, {}

    def once(kind):
        if kind not in found:
            found[kind] = rigs[kind].trained(tmp_path_factory.mktemp(kind))
        return found[kind]

    return once
