"""Metrics against examples small enough to compute by hand."""

import pytest

from deepwell.planner.published.metrics import (
    LayoutTimes,
    kendall,
    pick_by_rule,
    pick_fastest,
    ranks,
    regret_of,
    spearman,
    summarize_errors,
    summarize_ranks,
    summarize_regret,
    summarize_verdicts,
)


def choice(predicted, measured, *, fits=True, size=10.0, rule=0.0):
    return LayoutTimes(predicted_s=predicted, predicted_bytes=size, fits=fits, measured_s=measured, rule_key=(rule,))


def test_errors_are_summed_up_as_fractions():
    # |errors| are 0.05, 0.10, 0.30: median 0.10, mean 0.15; signed mean (-0.05 + 0.10 + 0.30) / 3.
    found = summarize_errors([-0.05, 0.10, 0.30])
    assert found["n"] == 3
    assert found["median_abs_rel_err"] == pytest.approx(0.10)
    assert found["mean_abs_rel_err"] == pytest.approx(0.15)
    assert found["bias"] == pytest.approx(0.35 / 3)
    assert found["within_10pct"] == pytest.approx(2 / 3)  # a tenth exactly is within


def test_no_rows_have_no_errors_rather_than_perfect_ones():
    assert summarize_errors([]) == {
        "n": 0, "median_abs_rel_err": None, "mean_abs_rel_err": None, "bias": None, "within_10pct": None,
    }  # fmt: skip
    assert summarize_verdicts([])["accuracy"] is None
    assert summarize_regret([])["mean"] is None


def test_running_out_of_memory_is_the_positive_class():
    # Predicted, measured: two found, one missed, one false alarm, four rightly fitting.
    verdicts = [(True, True)] * 2 + [(False, True)] + [(True, False)] + [(False, False)] * 4
    found = summarize_verdicts(verdicts)
    assert (found["true_oom"], found["missed_oom"], found["false_oom"], found["true_fit"]) == (2, 1, 1, 4)
    assert found["accuracy"] == pytest.approx(6 / 8)
    assert found["precision"] == pytest.approx(2 / 3)
    assert found["recall"] == pytest.approx(2 / 3)


def test_precision_is_unknown_where_nothing_was_predicted_to_run_out():
    found = summarize_verdicts([(False, False), (False, True)])
    assert found["precision"] is None and found["recall"] == 0.0 and found["accuracy"] == 0.5


def test_equal_values_share_their_rank():
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]


def test_rank_correlations_of_textbook_examples():
    a, b = [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]
    # Spearman: 1 - 6 * (0 + 1 + 1 + 0) / (4 * 15) = 0.8. Kendall: 5 of 6 pairs agree, one does not.
    assert spearman(a, b) == pytest.approx(0.8)
    assert kendall(a, b) == pytest.approx(4 / 6)
    assert spearman(a, [-x for x in a]) == pytest.approx(-1) and kendall(a, [-x for x in a]) == pytest.approx(-1)
    # tau-b with a tie: a tied pair leaves 5 of 6 on one side, and all five agree.
    assert kendall([1.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(5 / (5 * 6) ** 0.5)


def test_a_constant_side_has_no_correlation():
    assert spearman([1.0, 1.0], [1.0, 2.0]) is None and kendall([1.0, 1.0], [1.0, 2.0]) is None
    assert spearman([1.0], [1.0]) is None


def test_our_pick_is_the_fastest_that_is_predicted_to_fit():
    tight = choice(1.0, None, fits=False)
    group = (tight, choice(2.0, 2.2), choice(3.0, 2.0), choice(4.0, 4.0))
    picked = pick_fastest(group)
    assert picked.predicted_s == 2.0
    assert regret_of(picked, group) == pytest.approx(0.1)  # 2.2 over the best measured, 2.0


def test_a_pick_leaves_five_percent_of_the_memory_where_it_can():
    def sized(predicted, size):
        return LayoutTimes(
            predicted_s=predicted, predicted_bytes=size, fits=True, measured_s=predicted, limit_bytes=100.0
        )

    assert pick_fastest((sized(1.0, 96.0), sized(2.0, 94.0))).predicted_s == 2.0
    assert pick_fastest((sized(1.0, 96.0), sized(2.0, 97.0))).predicted_s == 1.0  # no room anywhere: what fits


def test_where_nothing_is_predicted_to_fit_the_smallest_is_picked():
    group = (choice(1.0, 1.0, fits=False, size=30.0), choice(2.0, 2.0, fits=False, size=20.0))
    assert pick_fastest(group).predicted_bytes == 20.0
    assert pick_by_rule(group).predicted_bytes == 20.0


def test_a_pick_that_ran_out_of_memory_is_a_miss_and_costs_what_the_slowest_does():
    group = (
        choice(1.0, None, rule=3.0),
        choice(2.0, 2.0, rule=1.0),
        choice(3.0, 3.0, rule=2.0),
        choice(9.0, 5.0, rule=9.0),
    )
    found = summarize_regret([group])
    assert found["misses"] == 1 and found["within_5pct"] == 0.0
    assert found["mean"] == pytest.approx(5.0 / 2.0 - 1)
    # The rule takes the second, which is the best.
    assert (found["rule_mean"], found["rule_within_5pct"], found["rule_misses"]) == (0.0, 1.0, 0)
    # A random pick: regrets 1.5 (out of memory), 0, 0.5, 1.5.
    assert found["random_mean"] == pytest.approx((1.5 + 0 + 0.5 + 1.5) / 4)
    assert found["random_within_5pct"] == pytest.approx(0.25)


def test_a_miss_is_not_within_five_percent_even_where_all_that_ran_are_equal():
    group = (choice(1.0, None), choice(2.0, 2.0), choice(3.0, 2.0), choice(4.0, 2.0))
    found = summarize_regret([group])
    assert found["within_5pct"] == 0.0 and found["mean"] == 0.0


def test_rank_correlation_needs_three_layouts_that_ran():
    two = (choice(1.0, 1.0), choice(2.0, 2.0), choice(3.0, None), choice(4.0, None))
    three = (choice(1.0, 1.0), choice(2.0, 3.0), choice(3.0, 2.0), choice(4.0, None))
    found = summarize_ranks([two, three])
    assert found["groups"] == 1
    assert found["spearman"] == pytest.approx(0.5) and found["kendall"] == pytest.approx(1 / 3)
