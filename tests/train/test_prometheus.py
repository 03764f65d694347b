"""The metrics page: read over HTTP and parsed by the rules of the text format."""

import re
import socket
import urllib.error
import urllib.request

import numpy as np
import pytest

from moejax.train.prometheus import PrometheusPage
from moejax.train.sinks import POSITION_BUCKETS, Sink

LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')


@pytest.fixture
def page():
    page = PrometheusPage(0, domains=["code", 'a "b\\c\nd'])
    yield page
    page.close()


def scrape(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def parse(text):
    """{name or name{labels}: value}; every metric described once, in one group, before its values."""
    values, kinds, order = {}, {}, []
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            assert name not in kinds
            kinds[name] = kind
        elif line[0] != "#":
            name, labels, value = LINE.fullmatch(line).groups()
            assert name in kinds
            key = f"{name}{{{labels}}}" if labels else name
            assert key not in values
            values[key] = float(value)
            order.append(name)
    for name, kind in kinds.items():
        assert kind == ("counter" if name.endswith("_total") else "gauge")
        places = [i for i, other in enumerate(order) if other == name]
        assert places == list(range(places[0], places[-1] + 1)), f"{name} is not in one group"
    return values


def test_page_over_http(page):
    assert isinstance(page, Sink)
    assert parse(scrape(page.url)) == {}
    groups = np.zeros((2, POSITION_BUCKETS))
    groups[0, 3], groups[1, 3] = 4, 12
    for step in (1, 2):
        record = {"step": step, "loss": 2.0 / step, "tokens": 16, "skipped": step - 1, "grad_norm": "nan", "max_violation": [1.0, 2.0, 6.0]}
        record |= {"loss_groups": 3 * groups.ravel(), "token_groups": groups.ravel(), "odd-name": -np.inf}
        record |= {"expert_load": np.array([[0, 4], [2, 2]]), "wall": {"seconds": 0.5, "data_wait": 0.125}}
        page.write(step, record)
    page.event({"event": "skipped_update", "step": 2})
    page.event({"event": "skipped_update", "step": 2})
    values = parse(scrape(page.url))
    assert np.isnan(values.pop("moejax_grad_norm")) and values.pop("moejax_odd_name") == -np.inf
    escaped = '{domain="a \\"b\\\\c\\nd"}'
    expected = {
        "moejax_step": 2,
        "moejax_steps_total": 2,
        "moejax_loss_nats": 1.0,
        "moejax_step_tokens": 16,
        "moejax_tokens_total": 32,
        "moejax_skipped": 1,
        "moejax_skipped_updates_total": 1,
        "moejax_step_seconds": 0.5,
        "moejax_step_seconds_total": 1.0,
        "moejax_data_wait_seconds": 0.125,
        "moejax_data_wait_seconds_total": 0.25,
        'moejax_max_violation{quantile="0"}': 1.0,
        'moejax_max_violation{quantile="0.5"}': 2.0,
        'moejax_max_violation{quantile="1"}': 6.0,
        'moejax_domain_loss_nats{domain="code"}': 3.0,
        f"moejax_domain_loss_nats{escaped}": 3.0,
        'moejax_domain_tokens_total{domain="code"}': 8,
        f"moejax_domain_tokens_total{escaped}": 24,
        'moejax_position_loss_nats{position="8"}': 3.0,
        'moejax_events_total{event="skipped_update"}': 2,
    }
    loads = {key: values.pop(key) for key in list(values) if "expert_relative_load" in key}
    assert loads['moejax_expert_relative_load{quantile="1"}'] == 2.0 and loads['moejax_expert_relative_load{quantile="0.5"}'] == 1.0
    assert values == expected
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(page.url.replace("/metrics", "/etc"))


def test_layers_only_when_asked_for():
    page = PrometheusPage(0, per_layer=True)
    page.write(1, {"load_cv": [0.25, 0.5]})
    page.close()
    values = parse(page.page())
    assert values['moejax_layer_load_cv{layer="0"}'] == 0.25 and values['moejax_layer_load_cv{layer="1"}'] == 0.5


def test_event_names_are_bounded(page):
    for number in range(50):
        page.event({"event": f"name {number}", "step": number})
    values = parse(page.page())
    assert len(values) == 33 and values['moejax_events_total{event="other"}'] == 18


def test_only_the_loopback_is_served(page):
    assert page._server.server_address == ("127.0.0.1", page.port) and page.port > 0


def test_port_in_use_and_bad_ports(page):
    with pytest.raises(ValueError, match=f"--metrics-port {page.port} is in use; give another port, or 0"):
        PrometheusPage(page.port)
    for port in (-1, 65536, 8.5, True, "80"):
        with pytest.raises(ValueError, match=f"--metrics-port is {port!r}; it must be an integer from 0"):
            PrometheusPage(port)
    with pytest.raises(ValueError, match="process 1 asked for a metrics page; only process 0"):
        PrometheusPage(0, process=1)


def test_close_frees_the_port():
    page = PrometheusPage(0)
    port = page.port
    page.close()
    page.close()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
