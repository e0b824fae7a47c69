"""Google's Gemini: `generateContent`.

Follows the types of the official SDK, `google-genai` 3.4 (API version v1).
"""
