//! The behavior of every store: one function per behavior over `&dyn Store`.
//!
//! `conformance!(name, open)` turns each of them into a test of one store. A behavior that is
//! missing from the list below is dead code, which the lints reject.

pub mod agents;
pub mod approvals;
pub mod audit;
pub mod calls;
pub mod deliveries;
pub mod directory;
pub mod events;
pub mod idempotency;
pub mod lists;
pub mod purge;
pub mod run_tools;
pub mod runs;
pub mod undelivered;
pub mod usage;
pub mod utp;

/// Every behavior, as tests of the store that this expression opens.
macro_rules! conformance {
    ($store:ident, $open:expr) => {
        mod $store {
            $crate::suite::tests! { $open;
                calls {
                    a_new_call_is_read_back_field_by_field
                    arguments_and_results_keep_their_text
                    unusual_characters_are_preserved
                    an_unknown_call_is_not_found
                    a_call_is_not_found_in_another_project
                    every_status_and_hold_is_read_back
                    a_fault_is_read_back_with_all_fields
                    a_rejected_raw_result_is_stored_with_its_fault
                    a_fallback_that_became_the_target_is_read_back
                    a_fallback_to_the_same_tool_keeps_its_own_arguments
                    saving_the_next_version_replaces_the_call
                    saving_a_stale_version_is_a_conflict
                    saving_an_unknown_call_is_a_conflict
                    one_of_many_concurrent_saves_of_a_version_succeeds
                    a_deadline_that_moved_is_read_back
                    the_health_check_succeeds
                }
                idempotency {
                    the_same_key_and_request_replay_the_first_call
                    a_call_is_found_by_its_idempotency_key
                    a_replay_returns_the_current_state_of_the_call
                    the_same_key_for_another_request_is_a_mismatch
                    keys_of_other_agents_and_projects_are_independent
                    calls_without_a_key_are_independent
                    one_of_100_concurrent_creates_stores_the_call
                }
                events {
                    numbers_increase_across_calls_in_commit_order
                    every_event_kind_is_read_back_with_its_data
                    events_implied_by_the_call_row_are_read_like_stored_ones
                    a_call_has_only_its_own_events
                    a_run_has_the_events_of_its_calls_in_its_project
                    a_project_has_the_events_of_its_calls
                    pages_give_every_event_once
                    events_of_a_run_with_many_calls_are_read_in_pages
                    a_page_starts_after_a_number_and_ends_at_its_limit
                    appending_to_an_unknown_call_has_no_effect
                    the_last_event_number_of_a_call_is_that_of_its_newest_event
                    reading_after_the_last_number_returns_only_later_events
                    records_of_one_commit_have_consecutive_numbers
                    followers_see_every_event_once_and_in_order_while_calls_end
                }
                lists {
                    the_newest_call_is_first
                    every_combination_of_filters_returns_the_matching_calls
                    pages_have_no_gaps_or_repeats_while_calls_arrive
                    filtered_pages_have_no_gaps_or_repeats_while_calls_arrive
                    a_call_moves_between_status_lists_with_its_status
                    the_since_filter_includes_its_boundary
                    extreme_limits_and_positions_are_accepted
                    lists_contain_only_calls_of_their_project
                    a_list_stops_after_max_bytes
                    open_calls_are_read_in_order_and_in_pages
                    ended_calls_are_not_open_calls
                }
                purge {
                    only_calls_that_ended_before_the_cutoff_are_deleted
                    a_call_committed_out_of_order_is_deleted_eventually
                    events_and_idempotency_keys_are_deleted_with_their_call
                    a_purge_deletes_at_most_its_limit_per_pass
                    event_numbers_are_not_reused_after_a_purge
                    a_purge_without_a_cutoff_deletes_every_ended_call
                }
                run_tools {
                    reading_tool_definitions_that_were_not_set_returns_none
                    tool_definitions_are_read_back_unchanged
                    putting_tool_definitions_again_replaces_them
                    tool_definitions_are_separate_per_project_and_run
                    tool_definitions_are_purged_after_the_last_call_of_their_run
                    a_purge_deletes_tool_definitions_up_to_its_limit
                }
                usage {
                    limits_and_switches_are_stored_replaced_and_removed
                    accepted_calls_are_listed_newest_first_since_a_time
                    a_recorded_clock_step_corrects_the_calls_before_it
                }
                agents {
                    every_version_of_an_agent_is_kept
                    the_runs_of_a_tree_are_found_and_purged
                    a_box_is_read_back_and_purged
                }
                approvals {
                    an_approval_is_stored_with_its_call
                    decisions_and_their_calls_are_one_commit
                    a_superseded_approval_keeps_its_decision
                    approvals_are_listed_newest_first_by_status_agent_and_tool
                    standing_approvals_are_replaced_and_expire
                    due_webhooks_of_approvals_are_found
                    another_key_of_a_call_leads_to_it
                    approvals_are_purged_with_their_call
                }
                undelivered {
                    an_undelivered_request_is_stored_with_its_call_and_run
                    an_undelivered_request_is_replaced_removed_and_expires
                }
                runs {
                    a_run_is_read_back_as_it_was_created
                    a_run_is_saved_by_version_together_with_its_journal
                    an_idempotency_key_makes_one_run
                    runs_are_listed_newest_first_by_project_status_model_and_time
                    open_runs_of_all_projects_are_read_in_pages
                    journal_entries_and_call_events_share_one_numbering
                    old_runs_are_purged_with_their_journals
                }
                deliveries {
                    a_delivery_is_stored_with_its_call_and_due_when_it_ends
                    a_call_without_a_callback_url_has_no_delivery
                    a_replayed_call_creates_no_second_delivery
                    pending_deliveries_are_read_by_due_time_and_in_pages
                    saving_a_delivery_stores_the_next_version_and_its_attempt
                    only_the_latest_attempts_of_a_delivery_are_kept
                    deliveries_are_listed_by_project_status_and_page
                    deliveries_and_tasks_are_purged_with_their_call
                    lists_can_be_limited_to_background_tasks
                    the_newest_record_of_a_kind_is_found
                }
                directory {
                    upstreams_and_their_tools_are_stored
                    credentials_are_deleted_with_their_upstream
                    an_empty_directory_has_version_0
                    a_registered_tool_is_read_back_field_by_field
                    registering_again_replaces_the_definition
                    a_client_stays_with_its_first_owner
                    unlisted_tools_are_kept_or_withdrawn_as_requested
                    a_client_can_get_another_owner
                    dropping_a_client_removes_its_offers
                    a_tool_exists_while_a_client_offers_it
                    withdrawing_a_tool_affects_one_project_only
                    keys_are_added_and_revoked_once
                    every_attribute_of_a_key_is_stored
                    a_rotation_ends_the_old_key_and_adds_the_new_one
                    session_tokens_are_added_revoked_expired_and_deleted
                    the_recorded_time_never_goes_back
                    an_api_key_is_not_revoked_before_its_creation
                    rules_are_replaced_and_dropped
                    each_change_of_the_rules_makes_a_version
                    old_versions_of_the_rules_are_deleted
                    a_change_based_on_another_version_is_a_conflict
                    one_of_many_concurrent_changes_of_a_version_succeeds
                    an_audit_entry_is_written_with_its_change
                    no_audit_entry_is_written_for_a_conflicting_change
                    the_audit_log_is_newest_first
                    the_audit_log_of_a_project_has_only_its_own_entries
                }
                audit {
                    an_audit_row_is_read_back_with_its_actor_and_origin
                    the_audit_log_is_a_chain
                    concurrent_audit_entries_make_one_chain
                    audit_rows_are_read_in_pages_of_both_orders
                    a_pruned_audit_log_still_verifies
                    pruning_stops_at_the_first_young_entry
                    an_entry_with_a_future_time_does_not_stop_pruning
                    a_purge_of_calls_keeps_the_audit_log
                }
                utp {
                    cards_are_written_once
                    one_of_many_concurrent_result_cards_of_a_call_is_stored
                    turns_are_saved_by_version
                    a_call_of_a_turn_kept_elsewhere_is_delivered
                    a_delegated_turn_is_stored_with_its_edges
                    the_turns_of_a_tree_are_found_and_purged
                    an_outcome_is_delivered_once_and_in_order
                    an_outcome_delivered_before_its_step_is_kept
                    the_outbox_is_read_and_emptied_in_order
                    dead_letters_are_listed_newest_first
                    old_cards_turns_and_inbox_items_are_purged
                    every_version_of_a_projects_tool_is_kept
                    an_old_tool_version_is_purged_after_its_last_possible_call
                }
            }
        }
    };
}

/// One test per behavior, each with its own store.
macro_rules! tests {
    ($open:expr; $($topic:ident { $($behaviour:ident)+ })+) => {
        $(mod $topic {
            // Some behaviors block a thread; a store may need another for its connections.
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $behaviour() {
                let Some(opened) = $open else { return };
                $crate::suite::$topic::$behaviour(opened.store.as_ref()).await;
                opened.close().await;
            })+
        })+
    };
}

pub(crate) use {conformance, tests};
