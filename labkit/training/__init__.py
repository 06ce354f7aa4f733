"""Recipes that train drafts: models whose exits work, heads, and adapters. Each is a function and a command."""
