"""Greenroom: self-hosted sandboxes for AI agents, one real microVM each, warmed up before they are asked for."""

__version__ = "0.1.0"
