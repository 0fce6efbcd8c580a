"""Former names of config fields, handle kwargs and constants: they work, and warn once."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from ep_a2a import config as config_package
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.errors import ConfigError
from tests.unit.test_config import config_of
from tests.unit.test_managers import handle_kwargs

FORMER = "rail is now internode_transport"


def test_a_config_takes_the_former_keyword():
    with pytest.warns(DeprecationWarning, match=FORMER) as caught:
        config = config_of(rail="nvshmem")
    assert len(caught) == 1
    assert config == config_of(internode_transport="nvshmem")


def test_a_config_has_the_former_attribute():
    config = config_of(internode_transport="nvshmem")
    with pytest.warns(DeprecationWarning, match=FORMER) as caught:
        assert config.rail == "nvshmem"
    assert [warning.filename for warning in caught] == [__file__]


def test_replace_takes_the_former_keyword():
    with pytest.warns(DeprecationWarning, match=FORMER):
        config = replace(config_of(), rail="peer_memory")
    assert config.internode_transport == "peer_memory"


def test_contradicting_names_are_refused():
    with pytest.raises(ConfigError, match="rail='nvshmem' beside internode_transport='peer_memory'"):
        config_of(rail="nvshmem", internode_transport="peer_memory")


def test_handle_kwargs_take_the_former_name():
    with pytest.warns(DeprecationWarning, match=FORMER) as caught:
        config = config_from_handle_kwargs(handle_kwargs(rail="torch.distributed"), True)
    assert len(caught) == 1
    assert config.internode_transport == "torch.distributed"


def test_names_of_today_do_not_warn(recwarn):
    config = config_of(internode_transport="nvshmem")
    assert pickle.loads(pickle.dumps(config)) == copy.copy(config) == replace(config)
    assert not recwarn.list


def test_the_list_of_transports_has_its_former_name():
    with pytest.warns(DeprecationWarning, match="RAILS is now INTERNODE_TRANSPORTS"):
        assert config_package.RAILS is config_package.INTERNODE_TRANSPORTS
