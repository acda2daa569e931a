"""Names the engine's metrics: the engine sends them, /metrics shows them, `edgemoe status` reads.

A figure is a number under its final Prometheus name, labels included. Families that end in _total never decrease.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TIER_HITS = "edgemoe_tier_hits_total"  # {tier}: expert calls by the fastest tier that had the expert when asked
TIER_MISSES = "edgemoe_tier_misses_total"  # {tier}: expert calls that the tier did not have
CPU_EXPERTS = "edgemoe_cpu_experts_total"  # of layer-steps, computed on the CPU: the device did not hold them
BYTES_MOVED = "edgemoe_bytes_moved_total"  # {from,to}: expert bytes moved between tiers
PREFETCHES = "edgemoe_prefetches_total"  # {from,to}: transfers that no step was waiting for
PREFETCH_WASTED = "edgemoe_prefetch_wasted_bytes_total"  # {tier}: prefetched into the tier, and dropped unused
LINK_RATE = "edgemoe_link_bytes_per_second"  # {link}: nvme, or a device's number; bytes over busy time, recent
LINK_IDLE = "edgemoe_link_idle_ratio"  # {link}: share of the last second or so
STALL_SECONDS = "edgemoe_stall_seconds_total"  # {tier}: steps waiting for experts that were in this tier
TIER_SLOTS = "edgemoe_tier_slots"  # {tier}: experts that the slab holds at most
TIER_EXPERTS = "edgemoe_tier_experts"  # {tier}: experts in it now
TIER_BYTES = "edgemoe_tier_bytes"  # {tier}: size of the slab
STORE_READ_BYTES = "edgemoe_store_read_bytes_total"  # {folder}: of experts, from each copy of the store
ROW_TABLE_BYTES = "edgemoe_row_table_bytes"  # of the tables of which rows are read one by one, on disk
ROW_CACHE_BYTES = "edgemoe_row_cache_bytes"  # of the memory for rows
ROW_SLOTS = "edgemoe_row_slots"  # rows that it holds at most
ROWS_HELD = "edgemoe_rows"  # rows in it now
ROWS_FOUND = "edgemoe_rows_taken_total"  # {where}: wanted rows: cached | ahead (read in time) | waited (for a read)
ROW_READ_BYTES = "edgemoe_row_read_bytes_total"  # of rows, from disk, in whole pages
ROW_WAIT_SECONDS = "edgemoe_row_wait_seconds_total"  # steps waiting for rows
EXPERTS_SCRUBBED = "edgemoe_experts_scrubbed_total"  # experts in RAM that were compared with their checksums
EXPERTS_DAMAGED = "edgemoe_experts_damaged_total"  # of these, the ones whose bytes had changed in memory
FAILING_PAGES = "edgemoe_failing_memory_pages"  # pages of experts' RAM that were damaged more than once
KV_BLOCKS = "edgemoe_kv_blocks"  # blocks of keys and values in all
KV_BLOCKS_REFERENCED = "edgemoe_kv_blocks_referenced"  # held by requests, not only by the prefix cache
WINDOW_BLOCKS = "edgemoe_kv_window_blocks"  # blocks of the layers with windows in all
WINDOW_BLOCKS_REFERENCED = "edgemoe_kv_window_blocks_referenced"  # held by requests
PREFIX_HIT_TOKENS = "edgemoe_prefix_hit_tokens_total"  # prompt tokens that the prefix cache supplied
PREFIX_MISS_TOKENS = "edgemoe_prefix_miss_tokens_total"  # prompt tokens that it did not supply
REQUESTS_RUNNING = "edgemoe_num_requests_running"
QUEUE_DEPTH = "edgemoe_num_requests_waiting"  # waiting requests
PREEMPTIONS = "edgemoe_preemptions_total"  # {way}: park | recompute
REQUESTS_FINISHED = "edgemoe_requests_finished_total"  # {reason}: stop | length | error | cancelled
REQUESTS_BLAMED = "edgemoe_requests_blamed_total"  # requests that ended because a step with them alone raised
STEPS = "edgemoe_steps_total"  # {phase}: prefill (a prompt is in the step) | decode
STEP_SECONDS = "edgemoe_step_seconds_total"  # {phase}
STEP_TOKENS = "edgemoe_step_tokens_total"  # {phase}: tokens computed
ACTIVE_EXPERTS = "edgemoe_active_experts_total"  # {phase}: distinct experts of a step, summed over its layers
DRAFT_TOKENS = "edgemoe_draft_tokens_total"  # {result}: accepted | rejected
DRAFT_SAVED_SECONDS = "edgemoe_draft_saved_seconds"  # that drafts have saved of late; below 0: lost
DRAFT_EXPERT_SECONDS = "edgemoe_draft_expert_seconds"  # expected of one more distinct expert in a decode step
LEARNED_STEPS = "edgemoe_cache_steps_total"  # {how}: steps learned from, with looks at the past or (glanced) without
LEARNED_SECONDS = "edgemoe_cache_processor_seconds_total"  # that the policy's own thread spent on them
LEARNED_MOVES = "edgemoe_cache_planned_moves_total"  # prefetches planned beyond the next layer
LEARNED_RIGHT = "edgemoe_cache_plans_right_ratio"  # share of recent plans' experts that were needed within their window
LEARNED_ETA = "edgemoe_cache_fusion_eta_ratio"  # {horizon}: weight of ScoutGate (gate: of the next layer's own gate)
SCOUTGATE_RECALL = (
    "edgemoe_scout_recall_ratio"  # {horizon}: chosen experts among ScoutGate's k most probable ones, recent
)
SCOUTGATE_LOG_LOSS = "edgemoe_scout_log_loss"  # {horizon}: nats per expert, recent
SCOUTGATE_CALIBRATION = "edgemoe_scout_calibration_ratio"  # {horizon}: expert calls forecast over calls made
SCOUTGATE_TRUST = "edgemoe_scout_trust_ratio"  # weight of its forecasts in fusion, by their current accuracy
SCOUTGATE_SECONDS = "edgemoe_scout_forecast_seconds"  # 99th percentile of the last 512
SCOUTGATE_SKIPPED = "edgemoe_scout_skipped_total"  # forecasts that would have come too late
SCOUTGATE_LEFT_OUT = "edgemoe_scout_left_out_total"  # forecasts not made: its share of the steps' time was spent
SCOUTGATE_LOADS = "edgemoe_scout_loads_total"  # ScoutGate exports taken into use
SCOUTGATE_REFUSED = "edgemoe_scout_refused_total"  # exports that were damaged, or for another model
REMOTE_CALLS = "edgemoe_remote_calls_total"  # {peer}: expert calls that a peer answered
REMOTE_FAILURES = "edgemoe_remote_failures_total"  # {peer}: expert calls that a peer did not answer
REMOTE_SECONDS = "edgemoe_remote_call_seconds_total"  # {peer}: from the call to its answer
REMOTE_EXPERTS = "edgemoe_remote_experts_total"  # experts of layer-steps that peers computed
REMOTE_RETRIES = "edgemoe_remote_retries_total"  # {why}: late | failed; calls whose experts were computed another way
ANSWERS_CHECKED = "edgemoe_answers_checked_total"  # {peer,found}: right | wrong; its answers that were computed again
ANSWER_CHECKS_DROPPED = "edgemoe_answer_checks_dropped_total"  # answers drawn for a check, without room for them
ANSWER_CHECK_SECONDS = "edgemoe_answer_check_seconds_total"  # spent on checks of answers
OWN_ANSWERS_WRONG = "edgemoe_own_answers_wrong_total"  # checks in which this box had computed wrongly
REMOTE_PLANS = "edgemoe_remote_layer_steps_total"  # {tokens,plan}: few | many; alone | helped: that lacked experts
REMOTE_GAIN = "edgemoe_remote_gain_ratio"  # {tokens}: expected time without help over that taken with it, recent
MEMORY_LENT = "edgemoe_memory_lent"  # whether the memory for experts follows the plan (1), or own requests (0)
MEMORY_RATIO = "edgemoe_steps_over_alone_ratio"  # recent steps' time over that expected of this box alone
REMOTE_STALL_SECONDS = "edgemoe_remote_stall_seconds_total"  # steps waiting for peers
KV_DISK_SAVED_BYTES = "edgemoe_kv_disk_saved_bytes_total"  # of keys, values and states, with memory.kv_disk_bytes
KV_DISK_RESTORED_TOKENS = "edgemoe_kv_disk_restored_tokens_total"  # whose keys and values came from disk
KV_DISK_RESTORE_SECONDS = "edgemoe_kv_disk_restore_seconds_total"  # that prompts waited for them
KV_DISK_FAILURES = "edgemoe_kv_disk_failures_total"  # damaged files, and prefixes that were not saved or restored
KV_FETCHED_BLOCKS = "edgemoe_kv_pulled_blocks_total"  # blocks of keys and values that came from other boxes
KV_FETCHED_BYTES = "edgemoe_kv_pulled_bytes_total"
KV_FETCH_SECONDS = "edgemoe_kv_pull_seconds_total"  # from being asked to fetch a prompt's blocks to the end of it
KV_FETCH_FAILURES = "edgemoe_kv_pull_failures_total"  # {reason}: why a prompt's blocks did not all come
KV_SERVED_BYTES = "edgemoe_kv_served_bytes_total"  # keys and values that other boxes fetched here
HANDED_OVER = "edgemoe_handed_over_requests_total"  # requests of this box that went on at another one after prefill
LOCAL_RATIO = "edgemoe_local_compute_ratio"  # experts of layer-steps computed here over all of them, since the start
SERVED_CALLS = "edgemoe_served_calls_total"  # expert calls of peers computed here
SERVED_BATCHES = "edgemoe_served_batches_total"  # computations for them; one may serve several calls
SERVED_SHED = "edgemoe_served_shed_total"  # calls of peers that were refused for load
SERVED_SECONDS = "edgemoe_served_seconds_total"  # time spent computing for peers
STAGE_STEPS = "edgemoe_stage_steps_total"  # {peer}: steps that another box computed in the layers that it holds
STAGE_FAILURES = "edgemoe_stage_failures_total"  # {peer}: questions that it did not answer in time
STAGE_SECONDS = "edgemoe_stage_wait_seconds_total"  # {peer}: that steps waited for it
STAGE_OPEN = "edgemoe_stage_open"  # {peer}: 1 if it answered when it was last asked, else 0
STAGE_DENSE_BYTES = "edgemoe_stage_dense_bytes"  # {peer}: of the dense weights in the layers that a box holds
STAGE_STEPS_SERVED = "edgemoe_stage_steps_served_total"  # steps that this box computed in its layers, for another box
PEER_LATENCY = "edgemoe_peer_latency_seconds"  # {peer}: of a round trip
PEER_RATE = "edgemoe_peer_bytes_per_second"  # {peer}
EXPERTS_FETCHED = "edgemoe_experts_fetched_total"  # from peers, verified
EXPERTS_REFUSED = "edgemoe_experts_refused_total"  # from peers, with a wrong checksum
BULK_SENT_BYTES = "edgemoe_bulk_sent_bytes_total"  # of experts, and of pieces of stores, to peers
HOME_EXPERTS = "edgemoe_home_experts"  # at home here by the plan
HOME_MISSING = "edgemoe_home_experts_missing"  # home experts that are not in RAM yet
CLUSTER_EPOCH = "edgemoe_cluster_epoch"  # the highest that this box has seen
CLUSTER_LEADING = "edgemoe_cluster_leading"  # 1 while this box leads
CLUSTER_BOXES = "edgemoe_cluster_boxes"  # {state}: other boxes by state: here | gone | leaving | refused
CLUSTER_PLAN = "edgemoe_cluster_plan_version"  # version of the plan that this box follows
ETCD_HEALTHY = "edgemoe_etcd_healthy"  # 1 while this voter's etcd member takes part
ETCD_STARTS = "edgemoe_etcd_starts_total"  # of that process
ETCD_RESIDENT = "edgemoe_etcd_resident_bytes"  # its memory
ETCD_FSYNCS = "edgemoe_etcd_fsyncs_total"  # of its log
CLUSTER_STALE = "edgemoe_cluster_stale_leaders_total"  # commands of a deposed leader, not obeyed
FORWARDED = "edgemoe_forwarded_requests_total"  # requests handed to other boxes' engines
EVADED = "edgemoe_evaded_engines_total"  # {why}: still | slow; requests of this front that left an engine
FORGOTTEN = "edgemoe_forgotten_requests_total"  # forwarded requests that ran again because the other box had lost them
HOSTED_REQUESTS = "edgemoe_guest_requests"  # hosted requests: of other boxes, running on this box's engine
HOSTED_REQUESTS_TOTAL = "edgemoe_guest_requests_total"
FORWARDED_HTTP = "edgemoe_forwarded_http_total"  # requests for models of other boxes, which one of these answered
HOSTED_HTTP = "edgemoe_hosted_http_total"  # such requests of other boxes that this one answers
ROUTED = "edgemoe_routed_requests_total"  # {to,why}: this box's requests by where (here | elsewhere) and why there
OFFERED = "edgemoe_offered_requests_total"  # this box's requests, to the leader
GRANTED = "edgemoe_granted_requests_total"  # of these, with an engine named by it
OFFERS_FORECAST = (
    "edgemoe_forecast_offers_total"  # {by}: of these, by the source of experts: cached (part) | alike (prompt)
)
OFFERS_OPEN = "edgemoe_offered_requests"  # this box's, that wait for the leader's word
OFFER_QUEUE = "edgemoe_leader_queue_requests"  # all boxes', that wait with this box, while it leads
EXPERT_CLUSTERS = "edgemoe_expert_clusters"  # engines that have one, while this box leads by them
EXPERT_CLUSTER_REQUESTS = "edgemoe_expert_cluster_requests"  # that these were fitted to
EXPERT_CLUSTER_FITS = "edgemoe_expert_cluster_fits_total"
OFFER_QUEUE_GRANTED = "edgemoe_leader_queue_granted_total"  # requests that this box has named an engine for

_MODEL = re.compile(r',?model_name="(?:[^"\\]|\\.)*"')  # the same label on the whole page
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(\{[^}]*\})?\s+(\S+)")


def named(family: str, **labels: str) -> str:
    """Returns the figure's name in a family by its labels: `named(TIER_HITS, tier="ram")`."""
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{family}{{{inside}}}" if labels else family


def parse(page: str) -> dict[str, float]:
    """Returns the metrics of a /metrics page by full name: the sums over all models, without the model_name label."""
    lines = (_MODEL.sub("", line, count=1).replace("{}", "", 1) for line in page.splitlines())
    matches = (_SAMPLE.match(line) for line in lines if not line.startswith("#"))
    found = dict[str, float]()
    for match in filter(None, matches):
        name = match[1] + (match[2] or "")
        found[name] = found.get(name, 0.0) + float(match[3])
    return found


def select(metrics: Mapping[str, float], family: str, **labels: str) -> float:
    """Returns the sum of a family's metrics that have at least these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value for name, value in metrics.items() if name.partition("{")[0] == family and all(w in name for w in wanted)
    )
