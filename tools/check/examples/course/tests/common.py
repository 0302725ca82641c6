"""What a course's tests share; nothing of ours may be taken for it, nor it for ours."""
