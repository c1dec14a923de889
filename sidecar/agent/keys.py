"""Variables from which model clients read their API keys."""

KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY", "HOSTED_VLLM_API_KEY")
LOGINS = ("ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN")
"""Variables that their clients prefer to a key."""
