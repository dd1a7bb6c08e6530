"""An HTTP server in front of an S3 server: records requests, and lets some of them go wrong as told.

It stands for what lies between a job and its store (networks, load balancers, login pages, other
products), and for a store's own bad days::

    with FaultProxy(server.endpoint_url) as proxy:
        store = open_store(url, storage_options={**options, "endpoint_url": proxy.endpoint_url})
        with proxy.inject(Rule(path="*/manifest.*", nth=1, fault=LoseAnswer())) as lost:
            save(store)
        assert lost.fired == 1

``docs/fault-proxy.md`` lists the faults and what they show. Needs aiohttp (the extra ``testing``).
"""

from remote_ckpt.testing.proxy.answer_faults import DelayAnswer, DelayRequest, LoseAnswer, Reply, Reset
from remote_ckpt.testing.proxy.body_faults import (
    ContentFault,
    Cut,
    FlipByte,
    Shorten,
    Stall,
    StreamFault,
    Surround,
    Throttle,
    ZeroBytes,
)
from remote_ckpt.testing.proxy.exchange import Answer, Call, Disconnect, Fault, Proceed
from remote_ckpt.testing.proxy.log import ProxiedRequest
from remote_ckpt.testing.proxy.rule_files import load_rules, parse_rules
from remote_ckpt.testing.proxy.rules import Rule
from remote_ckpt.testing.proxy.running import FaultProxy, Injection
from remote_ckpt.testing.proxy.s3_faults import FailKeys, IgnoreRange, ShortListing, WrongRange

__all__ = [
    "Answer",
    "Call",
    "ContentFault",
    "Cut",
    "DelayAnswer",
    "DelayRequest",
    "Disconnect",
    "FailKeys",
    "Fault",
    "FaultProxy",
    "FlipByte",
    "IgnoreRange",
    "Injection",
    "LoseAnswer",
    "Proceed",
    "ProxiedRequest",
    "Reply",
    "Reset",
    "Rule",
    "ShortListing",
    "Shorten",
    "Stall",
    "StreamFault",
    "Surround",
    "Throttle",
    "WrongRange",
    "ZeroBytes",
    "load_rules",
    "parse_rules",
]
