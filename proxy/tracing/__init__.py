"""OpenTelemetry traces, the extra `otel`: a span for each rollout and for each sync, sent where OTEL_ variables say.

parts      the classes that `app` builds from; the only file that is imported while tracing is off
provider   the SDK and its exporter, as the environment configures them
context    W3C trace context in and out of headers
rollouts   rollout: choose, upstream (one for each try), relay
syncs      sync: the phases, load and verify on each replica

The traced classes extend those of the planes and add nothing but spans: without tracing there is no code of it on the
way of a rollout, not even a question whether it is on. No prompt, no generated text and no token gets into a span.
"""
