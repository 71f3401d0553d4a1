//! The behavior of every store: one function per behavior over `&dyn Store`.
//!
//! `conformance!(name, open)` turns each of them into a test of one store. A behavior that is
//! missing from the list below is dead code, which the lints reject.

pub mod calls;
pub mod deliveries;
pub mod directory;
pub mod events;
pub mod idempotency;
pub mod lists;
pub mod loops;
pub mod purge;
pub mod runs;
pub mod utp;

/// Every behavior, as tests of the store that this expression opens.
macro_rules! conformance {
    ($store:ident, $open:expr) => {
        mod $store {
            $crate::suite::tests! { $open;
                calls {
                    a_new_call_is_read_back_field_by_field
                    arguments_and_results_keep_their_text
                    text_of_every_kind_is_kept
                    an_unknown_call_is_none
                    a_call_of_another_project_is_none
                    every_status_and_hold_is_read_back
                    a_fault_is_read_back_with_all_it_says
                    what_a_tool_gave_and_was_refused_is_kept_with_its_fault
                    an_alternate_in_the_targets_place_is_read_back
                    an_alternate_of_the_same_name_keeps_its_own_arguments
                    saving_the_next_version_replaces_the_call
                    saving_a_stale_version_changes_nothing
                    saving_an_unknown_call_is_stale
                    of_many_savers_of_one_version_one_wins
                    the_store_says_it_is_well
                }
                idempotency {
                    the_same_key_and_request_give_the_first_call
                    what_a_key_was_used_for_can_be_asked
                    a_replay_shows_the_call_as_it_is_now
                    the_same_key_for_another_request_is_a_mismatch
                    keys_of_other_agents_and_projects_are_independent
                    calls_without_a_key_never_meet
                    of_100_parallel_creates_one_makes_the_call
                }
                events {
                    numbers_rise_over_everything_in_the_order_of_commits
                    every_kind_is_read_back_with_its_facts
                    the_usual_beginning_is_told_like_everything_else
                    a_call_has_only_its_own_events
                    a_run_has_the_events_of_its_calls_in_its_project
                    a_project_has_the_events_of_its_calls
                    pages_give_every_event_once
                    a_run_of_very_many_calls_is_read_page_by_page
                    a_page_ends_at_its_limit_and_begins_after_a_number
                    appending_to_an_unknown_call_is_harmless
                    the_newest_event_of_a_call_is_its_last
                    following_from_the_newest_sees_only_what_comes
                    records_of_one_commit_stay_together
                }
                lists {
                    the_newest_call_is_first
                    every_filter_and_combination_gives_what_fits
                    pages_have_no_gaps_or_repeats_while_calls_come_in
                    filtered_pages_have_no_gaps_or_repeats_while_calls_come_in
                    a_call_moves_between_the_lists_with_its_status
                    a_list_by_time_begins_at_that_moment
                    a_limit_may_be_as_large_as_it_likes
                    no_project_sees_anothers_calls
                    what_is_beyond_enough_bytes_is_not_read
                    open_calls_come_in_order_and_in_pages
                    open_calls_are_those_that_have_not_ended
                }
                purge {
                    only_calls_that_ended_before_are_deleted
                    a_call_that_came_out_of_order_is_deleted_in_the_end
                    events_and_keys_go_with_their_call
                    a_purge_goes_in_steps
                    event_numbers_never_come_again
                    old_audit_entries_go_too
                    a_purge_of_all_times_takes_every_ended_call
                }
                runs {
                    a_run_that_nobody_set_is_none
                    a_run_is_read_back_as_it_was_put
                    putting_again_replaces
                    runs_of_other_projects_are_independent
                    a_run_goes_with_the_last_of_its_calls
                    runs_go_in_steps
                }
                loops {
                    a_run_is_read_back_as_it_was_created
                    a_run_is_saved_by_version_with_its_journal
                    a_key_makes_one_run
                    runs_are_listed_newest_first_by_project_status_model_and_time
                    open_runs_of_all_projects_come_in_pages
                    entries_and_events_of_calls_are_numbered_together
                    old_runs_go_with_their_journals
                }
                deliveries {
                    a_delivery_is_stored_with_its_call_and_due_with_its_end
                    a_call_without_a_url_has_no_delivery
                    a_replayed_call_brings_no_second_delivery
                    what_is_pending_comes_in_the_order_it_is_due_and_in_pages
                    saving_the_next_version_replaces_the_delivery_and_keeps_the_try
                    of_many_tries_the_last_are_kept
                    deliveries_are_listed_by_project_status_and_page
                    deliveries_and_tasks_go_with_their_call
                    background_tasks_are_listed_among_the_calls
                    the_newest_record_of_a_kind_is_found
                }
                directory {
                    upstreams_and_their_tools_are_kept
                    what_was_granted_for_an_upstream_goes_with_it
                    an_empty_directory_has_version_0
                    a_registered_tool_is_read_back_field_by_field
                    registering_again_replaces_the_definition
                    a_client_stays_with_its_first_owner
                    others_are_kept_or_withdrawn_as_asked
                    a_client_is_forgotten_with_all_it_offers
                    a_tool_lives_while_somebody_offers_it
                    withdrawing_in_one_project_leaves_the_other
                    keys_are_added_and_revoked_once
                    a_key_is_not_revoked_before_it_was_made
                    rules_are_replaced_and_dropped
                    a_change_decided_on_another_version_is_stale
                    of_many_changes_decided_on_one_version_one_wins
                    an_entry_is_written_with_its_change
                    no_entry_is_written_with_a_stale_change
                    the_audit_log_is_newest_first
                    the_audit_log_of_a_project_has_only_its_own
                }
                utp {
                    cards_are_written_once
                    of_many_results_of_a_call_one_is_kept
                    turns_are_saved_by_version
                    an_outcome_is_delivered_once_and_in_order
                    an_outcome_before_its_step_is_not_forgotten
                    the_outbox_is_emptied_in_order
                    dead_letters_are_listed_newest_first
                    what_is_old_goes
                    a_projects_tool_is_kept_by_version
                    an_old_definition_goes_with_the_last_call_that_can_refer_to_it
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
