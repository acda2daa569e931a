"""The placement for few rendezvous: against the optimum of small problems, on unseen requests, and from pairs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from edgemoe.policy.placement.exact import exact
from edgemoe.policy.placement.problem import PlacementProblem, Values
from edgemoe.policy.placement.rendezvous import (
    RendezvousCosts,
    rendezvous,
    rendezvous_cost,
    routes_for,
    scratch_for,
    search_from,
)
from edgemoe.policy.placement.rendezvous_search import begin, descend
from edgemoe.policy.placement.route_score import Routes, heaviest_pairs, remote_calls, routes_of_pairs, score
from tools.research.placement.rendezvous_bound import least_rendezvous, most_whole


def tokens_of(rng: np.random.Generator, nodes: int, tokens: int, layers: int, experts: int, top_k: int) -> list[Routes]:
    """Draws tokens of several kinds; each node has its own kinds."""
    kinds = rng.normal(0, 2, (nodes, 2, layers, experts))
    which = rng.integers(0, 2, (nodes, tokens))
    scores = kinds[np.arange(nodes)[:, None], which] + rng.gumbel(size=(nodes, tokens, layers, experts))
    return list(np.argsort(-scores, axis=3)[..., :top_k].astype(np.int16))


def activations_of(routes: list[Routes], experts: int) -> Values:
    return np.array(
        [[np.bincount(r[:, x].ravel(), minlength=experts) for x in range(r.shape[1])] for r in routes], float
    )


def optimum(problem: PlacementProblem, routes: list[Routes]) -> float:
    """Computes the least cost by integer programming.

    z: homes; y: a token calls a peer; x <= y, x <= z: the peer from which it has an expert.
    """
    nodes, layers, experts = problem.activations.shape
    cells = [(n, x, ids) for n, each in enumerate(routes) for token in each for x, ids in enumerate(token)]
    homes, calls = nodes * layers * experts, len(cells) * nodes
    top_k = routes[0].shape[2]
    size = homes + calls + calls * top_k
    rows: list[tuple[list[tuple[int, float]], float]] = []  # coefficients, and the least that they add up to
    for expert in range(layers * experts):
        rows.append(([(n * layers * experts + expert, 1.0) for n in range(nodes)], 1.0))
    for n, room in enumerate(problem.room):
        rows.append(([(n * layers * experts + each, -1.0) for each in range(layers * experts)], -float(room)))
    for cell, (own, layer, ids) in enumerate(cells):
        for place, expert in enumerate(ids):
            gets = [homes + calls + (cell * top_k + place) * nodes + n for n in range(nodes)]
            rows.append(([(each, 1.0) for each in gets], 1.0))
            for n, get in enumerate(gets):
                rows.append(([((n * layers + layer) * experts + int(expert), 1.0), (get, -1.0)], 0.0))
                if n != own:
                    rows.append(([(homes + cell * nodes + n, 1.0), (get, -1.0)], 0.0))
    matrix = lil_array((len(rows), size))
    for number, (row, _) in enumerate(rows):
        for column, value in row:
            matrix[number, column] = value
    price = np.zeros(size)
    price[homes : homes + calls] = 1.0
    found = milp(
        price,
        constraints=LinearConstraint(matrix.tocsr(), np.array([low for _, low in rows]), np.inf),
        integrality=(np.arange(size) < homes).astype(int),
        bounds=Bounds(0, 1),
    )
    assert found.status == 0
    return float(found.fun) / len(cells)


def test_it_is_near_the_optimum_of_small_cases() -> None:
    gaps = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        routes = tokens_of(rng, 3, 8, 2, 6, 2)
        problem = PlacementProblem(((4,), (4,), (6,)), activations_of(routes, 6))
        best = optimum(problem, routes)
        ours = score(rendezvous(problem, routes, RendezvousCosts(0.001)), routes).rendezvous
        assert least_rendezvous(routes, 6, problem.room.tolist()) <= best + 1e-9
        assert ours >= best - 1e-9
        gaps.append((ours - best) / best)
    assert np.mean(gaps) < 0.08


@pytest.mark.parametrize("seed", range(4))
def test_the_tables_stay_true_while_homes_change(seed: int) -> None:
    routes = tokens_of(np.random.default_rng(seed), 4, 50, 3, 10, 3)
    problem = PlacementProblem(((8,), (9,), (12,), (14,)), activations_of(routes, 10))
    start = exact(problem)
    search = search_from(problem, routes, start, RendezvousCosts(0.1))
    before = begin(search, scratch_for(3))
    calls = 0.1 * remote_calls(start, problem.activations)
    change = descend(search, scratch_for(3), 1000, 1e-9)
    assert change < 0
    homes = search.homes >> np.arange(4, dtype=np.uint64)[:, None, None] & np.uint64(1) != 0
    found = replace(start, homes=homes)
    fresh = search_from(problem, routes, found, RendezvousCosts(0.1))
    after = begin(fresh, scratch_for(3)) + 0.1 * remote_calls(found, problem.activations)
    assert before + calls + change == pytest.approx(after)
    assert after == pytest.approx(rendezvous_cost(problem, routes, found, RendezvousCosts(0.1)))
    assert score(found, routes).rendezvous * 4 * 50 * 3 == pytest.approx(
        after - 0.1 * remote_calls(found, problem.activations)
    )
    np.testing.assert_allclose(search.swing, fresh.swing, atol=1e-9)
    np.testing.assert_allclose(search.worth, fresh.worth, atol=1e-9)
    assert homes.sum(axis=(1, 2)).tolist() == problem.room.tolist()


def test_no_set_of_experts_serves_more_tokens_whole_than_the_bound_says() -> None:
    routes = tokens_of(np.random.default_rng(5), 1, 60, 2, 6, 2)[0]
    for slots in range(1, 13):
        most = 0
        for chosen in itertools.combinations(range(12), slots):
            has = np.isin(np.arange(12), chosen).reshape(2, 6)
            most = max(most, sum(int(has[x][routes[:, x]].all(axis=1).sum()) for x in range(2)))
        assert most <= most_whole(routes, 6, slots) + 1e-9
    assert most_whole(routes, 6, 12) == 120
    assert most_whole(routes, 6, 6) < 100


def test_fewer_peers_are_called_by_requests_that_it_has_not_seen() -> None:
    both = [np.split(each, 2) for each in tokens_of(np.random.default_rng(0), 3, 400, 6, 16, 4)]
    seen, unseen = [each[0] for each in both], [each[1] for each in both]
    problem = PlacementProblem(((36,), (36,), (40, 32)), activations_of(seen, 16))
    pairs = [heaviest_pairs(each, 16, 60) for each in seen]
    calls = score(exact(problem), unseen)
    by_routes = score(rendezvous(problem, seen), unseen)
    by_pairs = score(rendezvous(problem, routes_for(problem, pairs, 4, np.random.default_rng(0))), unseen)
    assert by_routes.rendezvous < 0.75 * calls.rendezvous
    assert by_pairs.rendezvous < 1.05 * by_routes.rendezvous
    assert min(by_routes.local_layers, by_pairs.local_layers) > calls.local_layers


def test_with_expensive_calls_it_makes_as_few_as_exact() -> None:
    routes = tokens_of(np.random.default_rng(1), 3, 100, 3, 8, 2)
    problem = PlacementProblem(((12,), (12,), (12,)), activations_of(routes, 8))
    assert remote_calls(rendezvous(problem, routes, RendezvousCosts(1e4)), problem.activations) == pytest.approx(
        remote_calls(exact(problem), problem.activations)
    )


def test_nodes_whose_rendezvous_cost_more_have_fewer() -> None:
    routes = tokens_of(np.random.default_rng(2), 2, 200, 4, 8, 2)
    problem = PlacementProblem(((18,), (18,)), activations_of(routes, 8))

    def of_first(cost: list[float]) -> float:
        found = rendezvous(problem, routes, RendezvousCosts(0.0, np.array(cost)))
        return score(found, [routes[0], routes[1][:0]]).rendezvous

    assert of_first([9.0, 1.0]) <= of_first([1.0, 9.0])


def test_a_step_computes_an_expert_once_for_all_its_tokens() -> None:
    """Fifteen steps need expert 0 alone, for 16 tokens each; twenty need experts 1 and 2, for 8 tokens each."""
    mine = np.repeat(np.array([0, 1, 2], np.int16), (240, 160, 160))[:, None, None]
    routes = [mine, mine[:0]]
    problem = PlacementProblem(((2,), (3,)), activations_of(routes, 3))
    computed = np.array([[[15.0, 20.0, 20.0]], [[0.0, 0.0, 0.0]]])
    by_tokens = rendezvous(problem, routes, RendezvousCosts(0.3))
    costs = RendezvousCosts(3.0, computed=computed, steps_per_token=np.full(2, 1 / 16))
    by_steps = rendezvous(problem, routes, costs)
    assert by_tokens.homes[0, 0, 0]
    assert by_steps.homes[0, 0].tolist() == [False, True, True]
    assert rendezvous_cost(problem, routes, by_steps, costs) == pytest.approx(240 / 16 + 3.0 * 15)


def test_the_more_it_costs_to_give_a_home_up_the_fewer_are() -> None:
    """Fewer moves are worth more each: half of the moves save more than half as much as all."""
    routes = tokens_of(np.random.default_rng(6), 3, 200, 6, 12, 3)
    problem = PlacementProblem(((30,), (30,), (40,)), activations_of(routes, 12))
    now = rendezvous(problem, [routes[1], routes[2], routes[0]])  # made for other requests than these
    costs = RendezvousCosts(0.3)
    cost = rendezvous_cost(problem, routes, now, costs)
    moves, saved = [], []
    for price in (0.0, 1e-4 * cost, 1e-3 * cost, 3e-3 * cost, cost):
        found = rendezvous(problem, routes, replace(costs, stay=now.homes * (price + 1e-12)))
        moves.append(int((found.homes & ~now.homes).sum()))
        saved.append(cost - rendezvous_cost(problem, routes, found, costs))
        assert (found.homes.sum(axis=(1, 2)) <= problem.room).all()
        assert found.homes.any(axis=0).all()
        assert saved[-1] >= price * moves[-1] - 1e-9
    assert moves[-1] == 0
    assert sorted(moves, reverse=True) == moves
    some = next(n for n, each in enumerate(moves) if each < 0.75 * moves[0])
    assert saved[some] / saved[0] > moves[some] / moves[0]


def test_with_less_room_than_current_homes_the_hottest_stay() -> None:
    routes = tokens_of(np.random.default_rng(7), 2, 100, 3, 8, 2)
    wide = PlacementProblem(((20,), (20,)), activations_of(routes, 8))
    now = rendezvous(wide, routes).homes
    tight = PlacementProblem(((9,), (20,)), wide.activations)
    found = rendezvous(tight, routes, RendezvousCosts(stay=now * 1e9)).homes
    assert found.sum(axis=(1, 2)).tolist() == [9, 20]
    assert found.any(axis=0).all()
    assert not (found[0] & ~now[0]).any()


def test_drawn_tokens_have_the_pairs_that_they_were_drawn_from() -> None:
    rng = np.random.default_rng(3)
    routes = tokens_of(rng, 1, 4000, 2, 12, 3)[0]
    pairs = heaviest_pairs(routes, 12, 66)
    made = routes_of_pairs(activations_of([routes], 12)[0], pairs, 3, 4000, rng, np.ones((2, 12), bool))
    assert all(len(set(ids)) == 3 for token in made.tolist() for ids in token)
    share = [activations_of([each], 12)[0] / len(each) for each in (routes, made)]
    assert np.abs(share[0] - share[1]).mean() < 0.05
    told = {tuple(row[:3]): row[3] for row in pairs.tolist()}
    drawn = {tuple(row[:3]): row[3] for row in heaviest_pairs(made, 12, 66).tolist()}
    off = sum(abs(count - drawn.get(pair, 0)) for pair, count in told.items())
    assert off < 0.25 * sum(told.values())


def test_pairs_are_told_heaviest_first_within_a_layer() -> None:
    routes = np.array([[[0, 1, 2]], [[0, 1, 3]], [[0, 1, 2]]], np.int16)
    assert heaviest_pairs(routes, 4, 2).tolist() == [[0, 0, 1, 3], [0, 0, 2, 2]]
