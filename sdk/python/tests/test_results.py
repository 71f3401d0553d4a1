"""Tests of the result builder and of the forms of errors, without a server."""

import asyncio
import math
import unittest

from toolcrib_sdk.utp import (
    AuthFailed,
    OutcomeUnknown,
    ToolResultBuilder,
    ToolResultContext,
    build_error_result_from_exception,
    parse_subject,
    safe_str,
)

COMMAND = {
    "tool_call_id": "tc_1",
    "agent_turn_id": "turn_1",
    "agent_id": "ada",
    "turn_epoch": "7",
    "after_execution": "suspend",
    "step_id": "step_of_the_command",
}
META = {"step_id": "step_1", "trace_id": "t" * 32, "parent_step_id": "step_0"}


def build(**fields):
    context = ToolResultContext.from_cmd_data(
        project_id="p", cmd_data=COMMAND, tool_call_meta=META
    )
    builder = ToolResultBuilder(context, author_id="tool.test", function_name="text.count")
    payload, card = builder.build(**fields)
    return payload, card.to_json()


class BuilderTest(unittest.TestCase):
    def test_a_success_repeats_the_identity_and_copies_the_lineage(self):
        payload, card = build(status="success", result={"words": 2})
        self.assertEqual(payload["turn_epoch"], 7)
        self.assertEqual(payload["step_id"], "step_of_the_command")
        self.assertEqual(payload["tool_result_card_id"], card["card_id"])
        self.assertNotIn("result", payload)
        for name, value in META.items():
            self.assertEqual(card["metadata"][name], value)
        content = card["content"]
        self.assertEqual(content["__type__"], "ToolResultContent")
        self.assertEqual((content["status"], content["error"]), ("success", None))

    def test_the_same_call_always_has_the_same_card_id(self):
        first, second = build(status="success", result=1), build(status="failed", result=2)
        self.assertEqual(first[1]["card_id"], second[1]["card_id"])

    def test_results_are_normalized(self):
        cases = [
            ({"status": "odd"}, "failed", "invalid_status"),
            ({"status": "success", "error": {"code": "x", "message": "y"}}, "failed", "x"),
            ({"status": "failed"}, "failed", "unknown_error"),
            (
                {"status": "failed", "result": {"error_code": "e", "error_message": "m"}},
                "failed",
                "e",
            ),
            ({"status": "success", "result": {1, 2}}, "failed", "result_not_serializable"),
            ({"status": "success", "result": math.nan}, "failed", "result_not_serializable"),
            (
                {"status": "failed", "error": {"code": "x", "message": "y", "detail": object()}},
                "failed",
                "error_not_serializable",
            ),
            (
                {"status": "success", "after_execution": "explode"},
                "failed",
                "invalid_after_execution",
            ),
            ({"status": "partial", "result": [1]}, "partial", "unknown_error"),
        ]
        for fields, status, code in cases:
            with self.subTest(fields=str(fields)):
                payload, card = build(**fields)
                self.assertEqual(payload["status"], status)
                self.assertEqual(card["content"]["error"]["code"], code)
                self.assertIn(payload["after_execution"], ("suspend", "terminate"))

    def test_a_command_without_identity_is_refused(self):
        for name in ("tool_call_id", "agent_turn_id", "agent_id", "turn_epoch"):
            with self.subTest(name=name), self.assertRaises(ValueError):
                ToolResultContext.from_cmd_data(project_id="p", cmd_data={**COMMAND, name: " "})


class ErrorTest(unittest.TestCase):
    def test_exceptions_are_classified(self):
        cases = [
            (ValueError("no"), "bad_request", 400),
            (KeyError("text"), "not_found", 404),
            (asyncio.TimeoutError(), "tool_timeout", 504),
            (ConnectionRefusedError("down"), "upstream_unavailable", 503),
            (AuthFailed("no key"), "auth_failed", 403),
            (RuntimeError("broken"), "internal_error", 500),
        ]
        for error, code, status in cases:
            with self.subTest(error=repr(error)):
                result, body = build_error_result_from_exception(error)
                self.assertEqual((body["code"], body["http_status"]), (code, status))
                self.assertTrue(body["message"])
                self.assertEqual(result["error_code"], code)
                self.assertEqual(result["error_message"], body["message"])
                self.assertEqual(result["error"], body)

    def test_an_unknown_outcome_names_the_code_of_toolcrib(self):
        _, body = build_error_result_from_exception(OutcomeUnknown("maybe", detail={"a": 1}))
        self.assertEqual(body["detail"], {"a": 1, "toolcrib_code": "OUTCOME_UNKNOWN"})


class SubjectTest(unittest.TestCase):
    def test_subjects_are_parsed(self):
        parts = parse_subject("cg.v1r3.p.public.cmd.tool.count.run.fast")
        self.assertEqual((parts.project_id, parts.channel_id), ("p", "public"))
        self.assertEqual((parts.target, parts.suffix), ("count", "run.fast"))
        for text in ("", "cg.v1r3.p.public.cmd.tool.count", "xx.v1r3.p.public.cmd.tool.count.run"):
            self.assertIsNone(parse_subject(text))

    def test_blank_text_is_none(self):
        self.assertEqual([safe_str(v) for v in (None, " ", " a ", 5)], [None, None, "a", "5"])


if __name__ == "__main__":
    unittest.main()
